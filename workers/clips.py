"""Clips of a video: half-open pts intervals cut from shots, windows or a manifest's intervals. No pictures, no floats.

A clip's ``t0_pts`` is the pts of its first frame and its ``t1_pts`` that of the frame after its last one (the video's
end after the last). Damage is cut out first: where damage begins before that next frame, the clip ends with it. Clips
that are not wanted stay as rows with ``state="filtered"`` and a reason, so that every clean frame is accounted for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import fsum
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import Field, model_validator

from videoflow.errors import RecipeError
from videoflow.keys import clip_key, digest
from videoflow.stage import Item, Product, StageParams, VideoStage
from videoflow.store import schemas
from videoflow.timeline import pts_to_us, snap_seconds
from workers.cuts import cuts_from_scores, shots_of

POOLED = ("motion", "sharpness", "luma", "black")


def exact(seconds: float) -> Fraction:
    """A recipe's seconds as the decimal number that was written."""
    return Fraction(str(seconds))


class ClipsParams(StageParams):
    """What becomes a clip. All times in seconds, read as decimal numbers.

    ``by``: shots (``max_seconds`` splits long ones), windows (side by side) or sliding (windows that begin every
    ``stride_seconds``). ``min_seconds``: shorter ones are filtered; ``threshold``: cut the stored scores again, in
    thousandths, None for the detector's own cuts.
    """

    by: Literal["shots", "windows", "sliding"] = "shots"
    min_seconds: float = Field(0.5, ge=0)
    max_seconds: float = Field(10.0, gt=0)
    window_seconds: float = Field(4.0, gt=0)
    stride_seconds: float | None = Field(None, gt=0)
    threshold: int | None = Field(None, ge=0, le=1000)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        name = "max_seconds" if self.by == "shots" else "window_seconds"
        longest = getattr(self, name)
        if self.min_seconds > longest:
            raise ValueError(f"min_seconds {self.min_seconds} is above {name} {longest}: no clip would be left")
        if (self.by == "sliding") != (self.stride_seconds is not None):
            raise ValueError("stride_seconds goes with by: sliding, which needs it")
        if self.threshold is not None and self.by != "shots":
            raise ValueError("threshold goes with by: shots")
        return self


@dataclass(frozen=True)
class Track:
    """The shown frames of one stream.

    ``edges``: pts of all frames, then the end; ``clean``: pts intervals without damage, half-open, rising.
    """

    stream: int
    time_base: Fraction
    start_pts: int
    edges: tuple[int, ...]
    clean: tuple[tuple[int, int], ...]

    @property
    def num_frames(self) -> int:
        return len(self.edges) - 1

    @classmethod
    def of(cls, probe: dict[str, Any]) -> Track:
        """From a row of the videos table."""
        pts = list(probe["pts"] or ())
        end = int(probe["end_pts"]) if pts else 0
        damage = sorted((d["t0_pts"], d["t1_pts"]) for d in probe["damage"] or ())
        clean, at = [], pts[0] if pts else 0
        for t0, t1 in damage:
            clean.append((at, min(t0, end)))
            at = max(at, t1)
        clean.append((at, end))
        time_base = Fraction(probe["tb_num"], probe["tb_den"])
        kept = tuple((a, b) for a, b in clean if a < b)
        return cls(int(probe["stream"]), time_base, int(probe["start_pts"] or 0), (*pts, end), kept)

    def frame_at_or_after(self, pts: int | Fraction) -> int:
        """First frame whose pts is at or after this one; the number of frames if there is none."""
        return bisect_left(self.edges, pts, 0, self.num_frames)


@dataclass(frozen=True)
class Piece:
    """Frames [first, stop), shown in [t0, t1)."""

    first: int
    stop: int
    t0: int
    t1: int


def clean_pieces(track: Track, first: int, stop: int) -> Iterator[Piece]:
    """What damage leaves of the frames [first, stop)."""
    for a, b in track.clean:
        low = max(first, track.frame_at_or_after(a))
        high = min(stop, track.frame_at_or_after(b))
        if low < high:
            yield Piece(low, high, track.edges[low], min(track.edges[high], b))


def split_piece(track: Track, piece: Piece, max_length: Fraction) -> list[Piece]:
    """Parts of near-equal length, none above ``max_length`` (pts) unless it is a single frame.

    ceil(length / max) parts with their edges on the nearest frames; where the frames do not allow that, one part
    more, or else parts as long as the limit allows.
    """
    length = piece.t1 - piece.t0
    if length <= max_length:
        return [piece]
    parts = int(-(-length // max_length))
    for count in (parts, parts + 1):
        inner = [_nearest_frame(track, piece, piece.t0 + Fraction(length * k, count)) for k in range(1, count)]
        pieces = _pieces_between(track, piece, inner)
        if pieces and all(p.t1 - p.t0 <= max_length for p in pieces):
            return pieces
    return _pieces_between(track, piece, _greedy_edges(track, piece, max_length))


def _nearest_frame(track: Track, piece: Piece, pts: Fraction) -> int:
    """The frame inside the piece whose pts is nearest, the earlier one at a tie."""
    i = bisect_left(track.edges, pts, piece.first, piece.stop)
    around = [j for j in (i - 1, i) if piece.first <= j < piece.stop]
    return min(around, key=lambda j: abs(track.edges[j] - pts))


def _greedy_edges(track: Track, piece: Piece, max_length: Fraction) -> list[int]:
    """Edges of parts as long as the limit allows, at least one frame each."""
    edges, start = [], piece.first
    for i in range(piece.first + 1, piece.stop + 1):
        end = piece.t1 if i == piece.stop else track.edges[i]
        if end - track.edges[start] > max_length and i - 1 > start:
            start = i - 1
            edges.append(start)
    return edges


def _pieces_between(track: Track, piece: Piece, inner: Sequence[int]) -> list[Piece]:
    """The piece cut at these frames; empty if they do not rise."""
    frames = [piece.first, *inner, piece.stop]
    times = [*(track.edges[i] for i in frames[:-1]), piece.t1]
    if any(a >= b for a, b in pairwise(frames)):
        return []
    return [Piece(a, b, t0, t1) for (a, b), (t0, t1) in zip(pairwise(frames), pairwise(times), strict=True)]


def windows_of(track: Track, window: Fraction, stride: Fraction) -> Iterator[tuple[int, int]]:
    """Frame ranges of the windows [start + k·stride, … + window) in pts units, until one reaches the end."""
    start, end = track.edges[0], track.edges[-1]
    k = 0
    while k == 0 or start + (k - 1) * stride + window < end:
        t0 = start + k * stride
        if t0 >= end:
            return
        yield track.frame_at_or_after(t0), track.frame_at_or_after(t0 + window)
        k += 1


class Clips(VideoStage):
    """Cuts one video into clips; one row a clip, in order of time (by interval, where a manifest names them)."""

    name: ClassVar[str] = "clips"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "clips"
    inputs: ClassVar[tuple[str, ...]] = ("probe", "shots", "quality")
    Params: ClassVar[type[StageParams]] = ClipsParams

    def schema(self) -> pa.Schema:
        return schemas.CLIPS

    def required_inputs(self) -> tuple[str, ...]:
        """Stages whose rows must be there; rows of quality are pooled where they are there."""
        return ("probe", "shots") if self.params.by == "shots" else ("probe",)

    def process(self, item: Item) -> Product:
        """All clips of one video. The digest is over keys, frames, numbers and states, not over pooled scores."""
        track = Track.of(item.rows["probe"][0])
        if not track.num_frames:
            return Product(digest=digest("clips"))
        found = self._from_intervals(item, track) if item.intervals else self._from_video(item, track)
        measured = item.rows.get("quality")
        quality = measured[0] if measured else None
        rows = [{**row, **pool_quality(quality, row["t0_pts"], row["t1_pts"])} for row in found]
        named = ("clip_key", "first_frame", "last_frame", "shot", "segment", "state", "reason")
        return Product(rows=rows, digest=digest("clips", *[[row[n] for n in named] for row in rows]))

    def _from_video(self, item: Item, track: Track) -> Iterator[dict[str, Any]]:
        seen: set[tuple[int, int]] = set()  # overlapping windows may leave the same frames between damage
        least = exact(self.params.min_seconds) / track.time_base
        for number, piece in self._pieces(item, track):
            if (piece.t0, piece.t1) in seen:
                continue
            seen.add((piece.t0, piece.t1))
            reason = "too_short" if piece.t1 - piece.t0 < least else None
            yield clip_row(item.video_key, track, piece, shot=number, reason=reason)

    def _pieces(self, item: Item, track: Track) -> Iterator[tuple[int, Piece]]:
        """(number of the shot or window, its clean pieces)."""
        p = self.params
        if p.by == "shots":
            longest = exact(p.max_seconds) / track.time_base
            for number, (first, stop) in enumerate(shots_of(self._cuts(item), track.num_frames)):
                for piece in clean_pieces(track, first, stop):
                    yield from ((number, part) for part in split_piece(track, piece, longest))
            return
        window = exact(p.window_seconds) / track.time_base
        stride = exact(p.stride_seconds) / track.time_base if p.by == "sliding" else window
        for number, (first, stop) in enumerate(windows_of(track, window, stride)):
            yield from ((number, piece) for piece in clean_pieces(track, first, stop))

    def _cuts(self, item: Item) -> list[int]:
        rows = item.rows.get("shots")
        if not rows:
            raise RecipeError("clips with by: shots need the shots stage: add it to the recipe, or use by: windows")
        if self.params.threshold is None:
            return list(rows[0]["cuts"])
        return cuts_from_scores(rows[0]["scores"], self.params.threshold)

    def _from_intervals(self, item: Item, track: Track) -> Iterator[dict[str, Any]]:
        seen: set[tuple[int, int]] = set()
        for number, (t0, t1) in enumerate(item.intervals):
            piece, reason = interval_piece(track, t0, t1)
            if reason is None and (piece.t0, piece.t1) in seen:
                reason = "duplicate_interval"
            seen.add((piece.t0, piece.t1))
            yield clip_row(item.video_key, track, piece, shot=-1, segment=number, reason=reason)


def interval_piece(track: Track, t0: Fraction, t1: Fraction) -> tuple[Piece, str | None]:
    """The frames of [t0, t1) seconds of stream time, and why it cannot be a clip (None if it can).

    An interval that reaches over the video's edge is what lies inside. One without any frame keeps its times as they
    were asked for, floored to pts.
    """
    asked = [int(Fraction(t) // track.time_base) for t in (t0, t1)]
    first, stop = (max(0, snap_seconds(Fraction(t), track.edges, track.time_base)) for t in (t0, t1))
    if first >= stop:
        inside = asked[0] < track.edges[-1] and asked[1] > track.edges[0]
        return Piece(max(0, min(first, track.num_frames)), 0, *asked), "empty_interval" if inside else "outside_video"
    piece = Piece(first, stop, track.edges[first], track.edges[stop])
    is_clean = any(a <= piece.t0 and piece.t1 <= b for a, b in track.clean)
    return piece, None if is_clean else "damaged"


def clip_row(
    video_key: str, track: Track, piece: Piece, *, shot: int, segment: int = -1, reason: str | None = None
) -> dict[str, Any]:
    """A row of the clips table without head columns and pooled scores; frames of an empty piece are -1."""
    count = max(0, piece.stop - piece.first)
    return {
        "clip_key": clip_key(video_key, track.stream, piece.t0, piece.t1),
        "t0_pts": piece.t0,
        "t1_pts": piece.t1,
        "tb_num": track.time_base.numerator,
        "tb_den": track.time_base.denominator,
        "start_pts": track.start_pts,
        "t0_us": pts_to_us(piece.t0, track.time_base),
        "t1_us": pts_to_us(piece.t1, track.time_base),
        "first_frame": piece.first if count else -1,
        "last_frame": piece.stop - 1 if count else -1,
        "num_frames": count,
        "shot": shot,
        "segment": segment,
        "state": "filtered" if reason else "done",
        "reason": reason,
    }


def pool_quality(quality: dict[str, Any] | None, t0_pts: int, t1_pts: int) -> dict[str, float | None]:
    """Means over the grid frames inside [t0_pts, t1_pts), None where there are none.

    Motion leaves out the first of them, which was compared with a frame outside the clip.
    """
    if quality is None:
        return dict.fromkeys(POOLED)
    first, stop = (bisect_left(quality["pts"], t) for t in (t0_pts, t1_pts))
    pooled: dict[str, float | None] = {}
    for name in POOLED:
        values = quality[name][first + (name == "motion") : stop]
        pooled[name] = fsum(values) / len(values) if values else None
    return pooled
