"""Decoding one audio stream, packet by packet, as the demuxer hands them out: a packet that fails is counted and leaves
a hole, it stops nothing. Priming and padding (edit lists, Opus pre-skip, LAME tags) are taken off by FFmpeg's decoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error

from videoflow.errors import MediaError
from videoflow.stage import HeardSound


def choose_audio(container: av.container.InputContainer, index: int | None = None) -> Any | None:
    """The audio stream to hear: container index ``index``, or the first one; None if there is none."""
    streams = [s for s in container.streams.audio if index is None or s.index == index]
    return streams[0] if streams else None


class Listener:
    """Decodes the packets of one audio stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.num_packets = self.num_failed = self.num_heard = 0
        self._context = stream.codec_context
        if self._context is not None:
            self._context.thread_count = 1

    def decode(self, packet: Any) -> Iterator[HeardSound]:
        """What a packet holds; nothing of one that fails. The last, empty packet gives what the decoder held back."""
        if self._context is None:
            return
        if packet.size:
            self.num_packets += 1
        try:
            frames = packet.decode()
        except av.error.MemoryError as e:
            raise MediaError("out_of_memory", "the audio decoder ran out of memory") from e
        except (av.error.FFmpegError, ValueError):
            self.num_failed += 1
            return
        time_base = Fraction(self.stream.time_base)
        for frame in frames:
            if frame.samples and frame.sample_rate:
                self.num_heard += 1
                yield HeardSound(frame.pts, time_base, frame, self.stream.index, self.num_failed)

    def problem(self) -> MediaError | None:
        """Why nothing was heard of a stream that has something to say; None if something was, or it is empty."""
        if self._context is None:
            return MediaError("codec_unsupported", f"this FFmpeg has no decoder for audio stream {self.stream.index}")
        if self.num_heard or not self.num_failed:
            return None
        failed = f"{self.num_failed} of {self.num_packets} packets fail"
        return MediaError("truncated", f"nothing of audio stream {self.stream.index} can be decoded ({failed})")
