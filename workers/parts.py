"""A long video in parts, each decoded by another worker, together equal to one pass by every digest.

A part answers for a window of pts. Its decoding begins at an IDR keyframe before the window, far enough for what the
consumers must have seen (`Margin`), and goes on a few frames after it. Only what the container's index proves can be
cut: mp4/mov whose index names every frame, H.264 or HEVC. Whatever turns up on the way that one pass would have to
judge as a whole (a packet that fails, a frame left out, another size) makes the video unfit: it is decoded unsplit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from videoflow.errors import MediaError, VideoflowError
from videoflow.media.decoder import Decoder, open_decoder
from videoflow.stage import Margin, PassConsumer, Product, VideoSummary
from videoflow.timeline import lower_median, steps_of
from videoflow.unit import PartResult, VideoPart
from workers.decode import Opener, PassFacts, Sink, finish, show, shown_frames
from workers.probe import header_columns, measured_row

_H264_IDR = frozenset({5})
_HEVC_IDR = frozenset({19, 20})
#: Frames that a decoder may hold back for reordering: H.264 and HEVC allow 16.
MAX_REORDERED = 16
SEEKS = 4


class Unfit(VideoflowError):
    """Why a video is decoded unsplit; never shown as an error."""


def widest(consumers: Sequence[PassConsumer]) -> Margin | None:
    """A margin that is enough for all consumers; None if one of them must see videos whole."""
    margins = [c.margin() for c in consumers]
    known = [m for m in margins if m is not None]
    if len(known) < len(margins):
        return None
    return Margin(
        max(m.frames for m in known),
        max(Fraction(m.seconds) for m in known),
        math.lcm(*(m.align_seconds for m in known)),
    )


# -- where to cut ----------------------------------------------------------------------------------------------------


def find_parts(
    path: str | Path, *, stream: int | None, margin: Margin, most: int, min_seconds: float
) -> tuple[VideoPart, ...]:
    """Parts of about equal length, at most ``most``, none shorter than ``min_seconds``.

    Raises:
        Unfit: it cannot be cut, or is too short for it.
    """
    with open_decoder(path, stream) as decoder:
        entries = _whole_index(decoder, Path(path).stat().st_size)
        time_base = decoder.time_base
        length = (entries[-1].timestamp - entries[0].timestamp) * time_base
        count = min(most, int(length / Fraction(min_seconds)))
        if count < 2:
            raise Unfit("too short")
        step = lower_median(steps_of([e.timestamp for e in entries]))
        start_pts = int(next(decoder.frames()).pts or 0)
        keyframes = {e.timestamp for e in entries if e.is_keyframe}
        edges = sorted({round(length * n / count / margin.align_seconds) * margin.align_seconds for n in range(count)})
        before = math.ceil(margin.seconds / time_base) + (margin.frames + MAX_REORDERED) * step
        begins: list[tuple[int, int | None]] = [(start_pts, None)]
        for seconds in edges[1:]:
            t0 = start_pts + math.ceil(seconds / time_base)
            if t0 - before <= start_pts:
                continue
            keyframe = _idr_before(decoder, t0 - before, keyframes)
            if keyframe > start_pts:
                begins.append((t0, keyframe))
    if len(begins) < 2:
        raise Unfit("too few keyframes")
    ends = [t0 for t0, _ in begins[1:]]
    windows = zip(begins, [*ends, None], strict=True)
    return tuple(VideoPart(n, (t0, t1), start_pts, keyframe) for n, ((t0, keyframe), t1) in enumerate(windows))


class _Entry(NamedTuple):
    """One frame in the container's index; ``end``: where its bytes end in the file."""

    timestamp: int
    end: int
    is_keyframe: bool
    is_discard: bool


def _whole_index(decoder: Decoder, num_bytes: int) -> list[_Entry]:
    """The container's index, if it names every frame of the stream and all of their bytes are there."""
    if "mp4" not in decoder.container.format.name:
        raise Unfit("no mp4 or mov")
    if decoder.stream.codec_context.name not in ("h264", "hevc") or not decoder.stream.codec_context.extradata:
        raise Unfit("neither H.264 nor HEVC")
    # Values at once: the entries point into memory that FFmpeg moves when it reads on.
    entries = [
        _Entry(e.timestamp, e.pos + e.size, bool(e.is_keyframe), bool(e.is_discard))
        for e in decoder.stream.index_entries
    ]
    if not entries or len(entries) != decoder.header_frames:
        raise Unfit("its index is not whole")
    if any(e.is_discard for e in entries) or max(e.end for e in entries) > num_bytes:
        raise Unfit("its index names frames that are hidden or missing")
    if any(step <= 0 for step in steps_of([e.timestamp for e in entries])):
        raise Unfit("its timestamps do not rise")
    return entries


def _idr_before(decoder: Decoder, pts: int, keyframes: set[int]) -> int:
    """The pts of the last keyframe of the index at or before ``pts``.

    Raises:
        Unfit: it is no IDR picture: what follows may lean on what comes before.
    """
    target = pts
    for _ in range(SEEKS):  # mov seeks by decoding time, which may be a bit late
        decoder.start_at(target)
        packet = next(decoder.container.demux(decoder.stream))
        if packet.dts not in keyframes or packet.pts is None or not _is_idr(bytes(packet), decoder):
            raise Unfit("a keyframe of its index is no IDR picture")
        if packet.pts <= pts:
            return int(packet.pts)
        target -= packet.pts - pts
    raise Unfit("its keyframes cannot be found")


def _is_idr(data: bytes, decoder: Decoder) -> bool:
    """True if the first coded picture of a packet (NAL units behind their lengths, ISO 14496-15) is an IDR picture."""
    context = decoder.stream.codec_context
    is_hevc = context.name == "hevc"
    extradata = bytes(context.extradata)
    size = (extradata[21 if is_hevc else 4] & 3) + 1
    at = 0
    while at + size < len(data):
        length = int.from_bytes(data[at : at + size], "big")
        kind = (data[at + size] >> 1) & 0x3F if is_hevc else data[at + size] & 0x1F
        if kind < 32 if is_hevc else 1 <= kind <= 5:
            return kind in (_HEVC_IDR if is_hevc else _H264_IDR)
        at += size + length
    return False


# -- one part --------------------------------------------------------------------------------------------------------


@dataclass
class DecodedPart:
    """What a part learned, before its rows are stored."""

    stream: int
    columns: dict[str, Any]
    pts: list[int]
    end_pts: int | None
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)


def decode_part(
    path: str | Path,
    *,
    video_key: str,
    part: VideoPart,
    margin: Margin,
    consumers: Sequence[PassConsumer],
    sink: Sink,
    stream: int | None,
    opener: Opener = open_decoder,
) -> DecodedPart:
    """Decode one part and feed every consumer.

    Raises:
        Unfit: something in it must be judged by one pass over the whole video.
        MediaError: the file cannot be used.
    """
    facts = PassFacts()
    failures: dict[str, MediaError] = {}
    with opener(path, stream) as decoder:
        if part.keyframe_pts is not None:
            decoder.start_at(part.keyframe_pts)
        shown = shown_frames(decoder, facts, video_key, consumers, start_pts=part.start_pts, window=part.window)
        own: list[int] = []
        seen = 0
        for frame in _until_after(shown, part, margin, decoder.time_base):
            show(frame, consumers, sink, failures)
            seen += 1
            if part.owns(frame.pts):
                own.append(frame.pts)
        tally = decoder.tally
        if tally.failed_packets or tally.dropped_frames or facts.size_changes or failures or not own:
            raise Unfit("packets fail, frames are left out, or their size changes")
        end_pts = tally.end_pts if part.window[1] is None else None
        products = finish(VideoSummary(seen, tally.end_pts, ()), consumers, sink, failures)
        if failures:
            raise Unfit("a stage fails on it")
        counts = {"num_packets": decoder.header_frames, "dropped_frames": 0, "size_changes": 0}
        return DecodedPart(
            facts.stream,
            {**header_columns(facts), **counts},
            own,
            end_pts,
            {name: dict(product.extra) for name, product in products.items()},
        )


def _until_after(frames: Iterator[Any], part: VideoPart, margin: Margin, time_base: Fraction) -> Iterator[Any]:
    """The part's frames and its margins.

    Raises:
        Unfit: it does not begin where the index said, or too late for the consumers.
    """
    before = after = 0
    t0, t1 = part.window
    first = part.start_pts if part.keyframe_pts is None else part.keyframe_pts
    for n, frame in enumerate(frames):
        if n == 0 and (frame.pts != first or (part.number and (t0 - frame.pts) * time_base < margin.seconds)):
            raise Unfit("it does not begin where its index says")
        before += frame.pts < t0
        if before < margin.frames and frame.pts >= t0 and part.number:
            raise Unfit("too few frames before a window")
        if t1 is not None and frame.pts >= t1:
            after += 1
            if after > margin.frames:
                return
        yield frame


# -- together --------------------------------------------------------------------------------------------------------


def joined_probe(parts: Sequence[PartResult]) -> tuple[dict[str, Any], str, VideoSummary]:
    """The videos row, its digest and the summary of a video whose parts are all there.

    Raises:
        Unfit: they do not make up what the container's index promised.
    """
    pts = [p for part in parts for p in part.pts]
    steps = steps_of(pts)
    end_pts = pts[-1] + lower_median(steps)
    first = parts[0]
    if len(pts) != first.columns["header_frames"] or any(step <= 0 for step in steps):
        raise Unfit("its parts do not hold the frames its index names")
    if end_pts != parts[-1].end_pts or any(p.columns != first.columns or p.stream != first.stream for p in parts):
        raise Unfit("its parts differ")
    summary = VideoSummary(len(pts), end_pts, ())
    row, key = measured_row(first.columns, first.stream, pts, summary)
    return row, key, summary


def joined(stage: PassConsumer, parts: Sequence[PartResult]) -> Product:
    """A consumer's product of the whole video."""
    return stage.join([Product(extra=part.extras[stage.name]) for part in parts])
