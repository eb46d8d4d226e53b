"""Decoding a video straight through: every shown frame once, in order, with its pts, and an honest account of damage.

The demuxer and decoder are FFmpeg's through PyAV, one thread, errors caught per packet. Damage is derived from packets
that fail, because decoders' own flags are unreliable (DESIGN.md, "Damage").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import av.error

from videoflow.errors import MediaError
from videoflow.media.container import choose_stream, open_media
from videoflow.timeline import lower_median

#: FFmpeg's names of elementary streams: bytes of a codec without a container, and so without timestamps.
ELEMENTARY = frozenset("h264 hevc vvc evc obu m4v h263 h261 cavsvideo avs2 avs3 dirac vc1".split())


class SteadyClock:
    """Timestamps for an elementary stream, as the FFmpeg command line gives them: frame i is shown at i steps, a step
    being what the stream's own headers say, or 1/25 s.

    Packets have no time of their own, so damage is told by frames: from the next one that comes out after a packet
    failed, up to a keyframe that comes out.
    """

    def __init__(self) -> None:
        self.damage: list[tuple[int, int]] = []
        self._next = 0
        self._open: int | None = None

    def failed(self) -> None:
        """A packet does not decode."""
        self._open = self._next if self._open is None else self._open

    def stamp(self, frame: av.VideoFrame, step: int) -> None:
        """Give a frame its time."""
        frame.pts, self._next = self._next, self._next + step
        if self._open is not None and frame.key_frame:
            if self._open < frame.pts:
                self.damage.append((self._open, frame.pts))
            self._open = None

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """All damage; an open interval reaches to the end."""
        return tuple(
            self.damage if self._open is None else [*self.damage, (self._open, max(self._next, self._open + 1))]
        )


class DamageTracker:
    """Turns packet results, in decode order, into half-open pts intervals.

    An interval starts at the smallest pts among a failed packet and all later ones in decode order, and ends at the pts
    of the next keyframe that decodes, or is open (None) at the stream's end.
    """

    def __init__(self) -> None:
        self.closed: list[tuple[int, int]] = []
        self._open: int | None = None
        self._seen_packet = False

    def packet(self, pts: int | None, *, keyframe: bool, ok: bool) -> None:
        """Record one packet: ``ok`` is False if decoding it raised."""
        starts_headless = not self._seen_packet and not keyframe
        self._seen_packet = True
        if pts is None:
            pts = self._open  # nothing better is known; the interval stays where it is
        if not ok or starts_headless:
            if pts is not None:
                self._open = pts if self._open is None else min(self._open, pts)
        elif self._open is not None and pts is not None:
            if keyframe:
                if self._open < pts:
                    self.closed.append((self._open, pts))
                self._open = None
            else:
                self._open = min(self._open, pts)

    def intervals(self, end_pts: int) -> tuple[tuple[int, int], ...]:
        """All intervals, merged and sorted; an open one reaches to ``end_pts`` at least."""
        spans = list(self.closed)
        if self._open is not None:
            spans.append((self._open, max(end_pts, self._open + 1)))
        merged: list[tuple[int, int]] = []
        for a, b in sorted(spans):
            if merged and a <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
            else:
                merged.append((a, b))
        return tuple(merged)


@dataclass
class Tally:
    """What one straight pass over a stream saw. Filled while `Decoder.frames` is consumed, whole at its end."""

    num_packets: int = 0
    failed_packets: int = 0
    dropped_frames: int = 0
    pts: list[int] = field(default_factory=list)
    damage: tuple[tuple[int, int], ...] = ()
    end_pts: int = 0


class Ear(Protocol):
    """Who wants to hear what lies beside the video stream."""

    @property
    def streams(self) -> tuple[Any, ...]: ...

    def take(self, packet: Any) -> None: ...


class Decoder:
    """One stream of one open file. Use once; a second pass opens the file again (seeking to 0 loses frames)."""

    def __init__(self, container: av.container.InputContainer, stream: Any) -> None:
        self.container = container
        self.stream = stream
        self.tally = Tally()
        self.ear: Ear | None = None  # set before `frames`: takes the packets of audio streams as they come by
        self._is_whole = True
        stream.codec_context.thread_count = 1

    @property
    def time_base(self) -> Fraction:
        return Fraction(self.stream.time_base)

    @property
    def header_frames(self) -> int:
        """Frames the container claims, 0 if it does not."""
        return int(self.stream.frames or 0)

    def start_at(self, pts: int) -> None:
        """Begin at the last keyframe that is shown at or before ``pts``; before `frames`."""
        self.container.seek(pts, stream=self.stream, backward=True, any_frame=False)
        self._is_whole = False

    def frames(self) -> Iterator[av.VideoFrame]:
        """Shown frames with strictly increasing pts. `tally` is complete when this ends.

        Raises:
            MediaError: ``truncated`` (no frame decodes), ``bad_timestamps``, ``encrypted``, ``io_error``.
        """
        tracker = DamageTracker()
        clock = SteadyClock() if self.container.format.name in ELEMENTARY else None
        durations = 0
        for packet in self._packets(tracker):
            if packet.size:
                self.tally.num_packets += 1
            ok = True
            try:
                decoded = self.decoded(packet)
            except av.error.FFmpegError as e:
                if isinstance(e, av.error.MemoryError):
                    raise MediaError("out_of_memory", "the decoder ran out of memory") from e
                decoded, ok = [], False
                self.tally.failed_packets += 1
            if packet.size:
                tracker.packet(_packet_time(packet), keyframe=bool(packet.is_keyframe), ok=ok)
                if clock is not None and not ok:
                    clock.failed()
            for frame in decoded:
                if clock is not None:
                    clock.stamp(frame, self._step(frame))
                if frame.pts is None or (self.tally.pts and frame.pts <= self.tally.pts[-1]):
                    self.tally.dropped_frames += 1
                    continue
                self.tally.pts.append(frame.pts)
                durations = durations or int(frame.duration or 0)
                yield frame
        self._finish(tracker, durations)
        if clock is not None:
            self.tally.damage = clock.intervals()

    def decoded(self, packet: Any) -> list[av.VideoFrame]:
        """Frames that come out when a packet goes in. Raises FFmpegError where it does not decode."""
        frames: list[av.VideoFrame] = packet.decode()
        return frames

    def _step(self, frame: av.VideoFrame) -> int:
        """Time from a frame to the next where the stream has no timestamps."""
        rate = Fraction(self.stream.guessed_rate or 25)
        return int(frame.duration or 0) or max(1, int(1 / (rate * self.time_base)))

    def _packets(self, tracker: DamageTracker) -> Iterator[Any]:
        """Packets in decode order; a demuxer that breaks off ends the stream and opens a damage interval."""
        try:
            if self.ear is None:
                yield from self.container.demux(self.stream)
            else:
                for packet in self.container.demux(self.stream, *self.ear.streams):
                    if packet.stream.index == self.stream.index:
                        yield packet
                    else:
                        self.ear.take(packet)
        except av.error.InvalidDataError:
            self.tally.failed_packets += 1
            tracker.packet(self.tally.pts[-1] + 1 if self.tally.pts else None, keyframe=False, ok=False)
        except av.error.FFmpegError as e:
            raise MediaError("io_error", f"reading stopped after {self.tally.num_packets} packets: {e.strerror}") from e

    def _finish(self, tracker: DamageTracker, duration: int) -> None:
        t = self.tally
        if not t.pts:
            if t.dropped_frames:
                raise MediaError("bad_timestamps", f"{t.dropped_frames} frames decode, none has a timestamp")
            raise MediaError(
                "truncated", f"no frame can be decoded ({t.num_packets} packets, {self.header_frames} claimed)"
            )
        steps = [b - a for a, b in zip(t.pts, t.pts[1:], strict=False)]
        t.end_pts = t.pts[-1] + (lower_median(steps) if steps else max(1, duration))
        t.damage = tracker.intervals(t.end_pts)
        # A file cut exactly between two packets has no packet that fails; its index still knows what is missing.
        is_indexed = self._is_whole and "mp4" in self.container.format.name and self.header_frames
        if is_indexed and self.header_frames > t.num_packets and not t.damage:
            t.damage = ((t.end_pts, t.end_pts + 1),)


def _packet_time(packet: Any) -> int | None:
    time = packet.pts if packet.pts is not None else packet.dts
    return int(time) if time is not None else None


def is_damaged(pts: int, damage: tuple[tuple[int, int], ...]) -> bool:
    """True if a pts lies in one of the half-open damage intervals."""
    return any(a <= pts < b for a, b in damage)


@contextmanager
def open_decoder(path: str | Path, stream: int | None = None) -> Iterator[Decoder]:
    """A Decoder over a local file's chosen stream.

    Raises:
        MediaError: see `open_media` and `choose_stream`.
    """
    with open_media(path) as container:
        yield Decoder(container, choose_stream(container, stream))
