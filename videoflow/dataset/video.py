"""One video for people and tests: exact frames of the source by index or by time, each with its pts.

Frames are found by decoding straight through, so that frame i is the i-th shown frame in every container, edit lists,
damage and late starts included. That costs a decode up to the last frame asked for: right first; trainers read the
cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from videoflow.errors import FrameIndexError, InputError
from videoflow.media.decoder import Decoder, Tally, is_damaged, open_decoder
from videoflow.media.picture import Geometry, Picture, geometry_of
from videoflow.timeline import is_vfr, lower_median, pts_to_seconds, snap_seconds, steps_of


@dataclass(frozen=True)
class VideoFrame:
    """``index`` from 0 among shown frames; ``pts`` in the stream's time base; ``image`` uint8 (H, W, 3) RGB, upright,
    at stored resolution (sample aspect ratio not applied)."""

    index: int
    pts: int
    pts_seconds: float
    image: np.ndarray

    def __repr__(self) -> str:
        return f"VideoFrame({self.index}, {self.pts_seconds:.6f} s, {self.image.shape[1]}×{self.image.shape[0]})"


@dataclass(frozen=True)
class _Facts:
    tally: Tally
    geometry: Geometry
    time_base: Fraction


class Video:
    """A local video file.

    Args:
        path: of the file. stream: container index; None takes the first video stream that is no cover picture.
        timeout_seconds: no call takes longer than this; TimeoutError then.

    Raises:
        MediaError: on first use, if the file cannot be used; its ``code`` says why.
    """

    def __init__(self, path: str | Path, *, stream: int | None = None, timeout_seconds: float | None = None) -> None:
        self.path = Path(path)
        self._stream = stream
        self._timeout = timeout_seconds

    def __repr__(self) -> str:
        return f"Video({str(self.path)!r})"

    def __len__(self) -> int:
        """Shown frames that decode; found by decoding once, never from the header."""
        return len(self._facts.tally.pts)

    @cached_property
    def _facts(self) -> _Facts:
        geometry = None
        with open_decoder(self.path, self._stream) as decoder:
            for frame in self._in_time(decoder):
                geometry = geometry or geometry_of(frame, decoder.stream)
            assert geometry is not None
            return _Facts(decoder.tally, geometry, decoder.time_base)

    @property
    def pts(self) -> Sequence[int]:
        """pts of every shown frame."""
        return self._facts.tally.pts

    @property
    def time_base(self) -> Fraction:
        return self._facts.time_base

    @property
    def start_seconds(self) -> float:
        return pts_to_seconds(self.pts[0], self.time_base)

    @property
    def duration_seconds(self) -> float:
        """Length of picture: from the first pts to the end of the last frame."""
        return float((self._facts.tally.end_pts - self.pts[0]) * self.time_base)

    @property
    def fps(self) -> float | None:
        """1 / median step; None for a single frame."""
        steps = steps_of(self.pts)
        return float(1 / (lower_median(steps) * self.time_base)) if steps else None

    @property
    def is_vfr(self) -> bool:
        return is_vfr(self.pts, self.time_base)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of `frames`' images."""
        g = self._facts.geometry
        return (g.height, g.width) if g.orientation.transpose else (g.width, g.height)

    @property
    def damage_seconds(self) -> list[tuple[float, float]]:
        """Half-open intervals of stream time whose frames lean on damaged data."""
        tb = self.time_base
        return [(pts_to_seconds(a, tb), pts_to_seconds(b, tb)) for a, b in self._facts.tally.damage]

    def is_clean(self, index: int) -> bool:
        """False if the frame lies in a damaged interval."""
        return not is_damaged(self.pts[index], self._facts.tally.damage)

    def frames(
        self,
        *,
        index: int | Sequence[int] | None = None,
        at: float | Fraction | Sequence[float | Fraction] | None = None,
        since_start: bool = False,
    ) -> list[VideoFrame]:
        """Exact frames, in the order asked for.

        Args:
            index: of shown frames, from 0; negative ones count from the end.
            at: stream time in seconds: the frame within min(1 ms, half a step), else the last one at or before it.
            since_start: ``at`` counts from the first frame instead of stream time.

        Raises:
            FrameIndexError: an index beyond the end, a time before the first frame or at or after the last one's end.
            InputError: neither or both of ``index`` and ``at``.
        """
        if (index is None) == (at is None):
            raise InputError("give either index= or at=")
        if index is not None:
            wanted = [index] if isinstance(index, (int, np.integer)) else list(index)
            positions = [self._position(int(i)) for i in wanted]
        else:
            times = [at] if isinstance(at, (int, float, Fraction)) else list(at or ())
            positions = [self._position_at(t, since_start) for t in times]
        return self._pick(positions)

    def _position(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise FrameIndexError(f"{self.path.name}: frame {index} asked for, there are {count} (0…{count - 1})")
        return index % count

    def _position_at(self, seconds: float | Fraction, since_start: bool) -> int:
        tb, pts = self.time_base, self.pts
        t = Fraction(seconds) + (pts[0] * tb if since_start else 0)
        position = snap_seconds(t, pts, tb)
        if position < 0 or t >= self._facts.tally.end_pts * tb:
            span = f"{pts_to_seconds(pts[0], tb):.6f}…{pts_to_seconds(self._facts.tally.end_pts, tb):.6f} s"
            raise FrameIndexError(f"{self.path.name}: no frame at {float(t):.6f} s, the picture lasts {span}")
        return position

    def _pick(self, positions: list[int]) -> list[VideoFrame]:
        wanted = set(positions)
        found: dict[int, VideoFrame] = {}
        if not wanted:
            return []
        with open_decoder(self.path, self._stream) as decoder:
            geometry = None
            for i, frame in enumerate(self._in_time(decoder)):
                geometry = geometry or geometry_of(frame, decoder.stream)
                if i in wanted:
                    # A frame of another size than the first keeps its own: this is the source's truth.
                    own = Geometry(frame.width, frame.height, geometry.sar, geometry.orientation)
                    w, h = (frame.height, frame.width) if own.orientation.transpose else (frame.width, frame.height)
                    image = np.array(Picture(frame, own).rgb(w, h))
                    found[i] = VideoFrame(i, frame.pts, pts_to_seconds(frame.pts, decoder.time_base), image)
                    if len(found) == len(wanted):
                        break
        return [found[p] for p in positions]

    def _in_time(self, decoder: Decoder) -> Iterator[Any]:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        for frame in decoder.frames():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.path.name}: not done within {self._timeout} s")
            yield frame
