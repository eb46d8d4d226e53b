"""Chosen intervals of a video, decoded once more: each one once, from a keyframe that gives the pictures of one pass.

What the pass saw is the truth: the pts of all shown frames are known before anything is decoded here, and every frame
handed over is checked against them. Where decoding may begin is decided by proof, not by hope: the container keeps
times with its packets (mp4, Matroska, MPEG-TS, FLV), the codec's keyframes lean on nothing before them, and for H.264
and HEVC the packet itself shows that it is an IDR (or, in HEVC, a CRA or BLA) picture. Everything else, a packet that
fails on the way, and frames that are not those of the pass lead back to the video's beginning, which is always right
and is counted. docs/decisions/0018 has the price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av.error

from videoflow.errors import MediaError
from videoflow.media.container import choose_stream, open_media
from videoflow.media.decoder import open_decoder
from videoflow.media.picture import Geometry, Picture, orientation_from
from videoflow.stage import ShownFrame

#: FFmpeg's names of containers that keep a time with every packet, so that it is the same wherever reading begins.
TIMED = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"})
#: Codecs whose every keyframe, as FFmpeg marks it, leans on nothing before it.
CLEAN_KEYFRAMES = frozenset(
    "vp8 vp9 av1 mpeg1video mpeg2video mpeg4 h263 flv1 mjpeg prores ffv1 dnxhd rawvideo huffyuv ffvhuff".split()
)
_H264_SLICES, _H264_CLEAN = range(1, 6), frozenset({5})
_HEVC_CLEAN = frozenset(range(16, 22))
#: Keyframes that are tried, each before the last, until one is clean.
TRIES = 6
#: A gap of fewer frames is decoded on through: to look for a keyframe costs more.
NEAR_FRAMES = 16


@dataclass(frozen=True)
class VideoFacts:
    """What the decode pass measured of a video: its stream, the pts of all shown frames, damage, geometry."""

    stream: int
    time_base: Fraction
    pts: tuple[int, ...]
    end_pts: int
    damage: tuple[tuple[int, int], ...]
    geometry: Geometry

    @staticmethod
    def of(row: dict[str, Any]) -> VideoFacts:
        """From a row of the videos table."""
        turn = orientation_from(row["rotation"], row["mirrored"])
        sar = Fraction(row["sar_num"], row["sar_den"])
        return VideoFacts(
            row["stream"],
            Fraction(row["tb_num"], row["tb_den"]),
            tuple(row["pts"]),
            row["end_pts"],
            tuple((d["t0_pts"], d["t1_pts"]) for d in row["damage"] or ()),
            Geometry(row["width"], row["height"], sar, turn),
        )


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges of frames, those that overlap or touch made one, ascending."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((first, stop))
    return found


class _Unsafe(Exception):
    """What comes out is not what one pass gives."""


@dataclass
class _Run:
    """Decoding under way: ``frames`` in order; ``keyframe``: pts where it began, None for the video's beginning."""

    frames: Iterator[Any]
    files: ExitStack
    keyframe: int | None
    reached: int = -(1 << 62)  # pts of the last frame that came out


class IntervalReader:
    """Reads intervals of one file. ``beat`` is called for every frame that is decoded, wanted or not.

    Attributes:
        intervals: that were decoded. from_start: of these, those that had to be decoded from the video's beginning.
        frames_decoded: all frames, those on the way to an interval included.
    """

    def __init__(self, path: str | Path, facts: VideoFacts, *, beat: Callable[[], None] = lambda: None) -> None:
        self._path, self._facts, self._beat = path, facts, beat
        self._can_seek = True
        self.intervals = self.from_start = self.frames_decoded = 0

    def frames(self, spans: Sequence[tuple[int, int]]) -> Iterator[ShownFrame]:
        """The shown frames of ranges of frames (`merged`), in order. A picture is only valid until the next frame.

        Raises:
            MediaError: the file cannot be read, or does not show what one pass showed.
        """
        run: _Run | None = None
        try:
            for first, stop in spans:
                run = self._run_for(first, run)
                done = first
                while True:
                    try:
                        for shown in self._shown(run, done, stop):
                            yield shown
                            done += 1
                        break
                    except _Unsafe:
                        run.files.close()
                        self._can_seek = False
                        run = self._from_start(done)
                self.intervals += 1
        finally:
            if run is not None:
                run.files.close()

    # -- where to begin ----------------------------------------------------------------------------------------------

    def _run_for(self, first: int, run: _Run | None) -> _Run:
        """The run that will give frame ``first``: the one under way where that is nearer, else one of its own."""
        pts = self._facts.pts
        if run is not None and (first < NEAR_FRAMES or pts[first - NEAR_FRAMES] <= run.reached):
            return run
        found = self._seek(pts[first]) if first and self._can_seek else None
        if run is None:
            return found or self._from_start(first)
        if found is None or found.keyframe is None or found.keyframe <= run.reached:
            if found is not None:
                found.files.close()
            return run
        run.files.close()
        return found

    def _from_start(self, first: int) -> _Run:
        self.from_start += first > 0
        files = ExitStack()
        decoder = files.enter_context(open_decoder(self._path, self._facts.stream))
        return _Run(decoder.frames(), files, None)

    def _seek(self, pts: int) -> _Run | None:
        """Decoding from the last clean keyframe at or before ``pts``; None where there is none to be sure of."""
        facts = self._facts
        with ExitStack() as files:
            container = files.enter_context(open_media(self._path))
            stream = choose_stream(container, facts.stream)
            context = stream.codec_context
            if container.format.name not in TIMED or context.name not in CLEAN_KEYFRAMES | {"h264", "hevc"}:
                return None
            context.thread_count = 1
            target, back = pts, 0
            for _ in range(TRIES):
                try:
                    container.seek(target, stream=stream, backward=True, any_frame=False)
                    packets = container.demux(stream)
                    first = next((p for p in packets if p.size and p.is_keyframe), None)
                except av.error.FFmpegError:
                    return None
                if first is not None and first.pts is None:
                    return None
                if first is not None and first.pts <= pts and is_clean(bytes(first), context):
                    return _Run(_decoded(first, packets), files.pop_all(), int(first.pts))
                # MPEG-TS lands anywhere: the next keyframe may be too late, or there may be none after it.
                back = max(2 * back, int(1 / facts.time_base) if first is None else abs(int(first.pts) - pts), 1)
                target -= back
        return None

    # -- frames ------------------------------------------------------------------------------------------------------

    def _shown(self, run: _Run, first: int, stop: int) -> Iterator[ShownFrame]:
        """Frames [first, stop) of a run, each checked to be the next one that the pass saw."""
        facts = self._facts
        pts, at = facts.pts, first
        while at < stop:
            frame = self._next(run)
            if frame is not None and frame.pts is not None and frame.pts < pts[first]:
                continue
            if frame is None or frame.pts != pts[at]:
                self._differs(run, pts[at])
            at += 1
            after = pts[at] if at < len(pts) else facts.end_pts
            yield ShownFrame(at - 1, frame.pts, after, Picture(frame, facts.geometry))

    def _next(self, run: _Run) -> Any:
        try:
            frame = next(run.frames, None)
        except av.error.FFmpegError as e:
            raise _Unsafe from e
        if frame is not None:
            self.frames_decoded += 1
            self._beat()
            if frame.pts is not None:
                run.reached = max(run.reached, frame.pts)
        return frame

    def _differs(self, run: _Run, pts: int) -> None:
        if run.keyframe is not None:
            raise _Unsafe
        raise MediaError(
            "bad_timestamps",
            f"decoded once more, it shows no frame at pts {pts}, as it did before; is it the same file?",
        )


def _decoded(first: Any, packets: Iterator[Any]) -> Iterator[Any]:
    yield from first.decode()
    for packet in packets:
        yield from packet.decode()


def is_clean(data: bytes, context: Any) -> bool:
    """True if decoding may begin at this keyframe's packet: no frame shown at or after it leans on one before it."""
    if context.name not in ("h264", "hevc"):
        return context.name in CLEAN_KEYFRAMES
    is_hevc = context.name == "hevc"
    for unit in nal_heads(data, bytes(context.extradata or b""), is_hevc=is_hevc):
        kind = (unit >> 1) & 0x3F if is_hevc else unit & 0x1F
        if is_hevc and kind < 32:
            return kind in _HEVC_CLEAN
        if not is_hevc and kind in _H264_SLICES:
            return kind in _H264_CLEAN
    return False


def nal_heads(data: bytes, extradata: bytes, *, is_hevc: bool) -> Iterator[int]:
    """First byte of every NAL unit: behind lengths (ISO 14496-15) if the extradata say so, else behind start codes."""
    at = 0
    if extradata[:1] == b"\x01":
        size = (extradata[21 if is_hevc else 4] & 3) + 1
        while at + size < len(data):
            yield data[at + size]
            at += size + int.from_bytes(data[at : at + size], "big")
        return
    while (at := data.find(b"\x00\x00\x01", at)) >= 0 and at + 3 < len(data):
        yield data[at + 3]
        at += 3
