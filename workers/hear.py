"""The audible half of the decode pass: packets of the audio streams that consumers hear, decoded beside the video's, in
the same walk through the file.

What sample belongs to which picture is known once the first frame is shown, so packets before it wait, undecoded. In a
file that holds all its sound before its pictures that would be too much: there the audio is read on its own afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import av.error

from videoflow.errors import MediaError
from videoflow.media.container import open_media
from videoflow.media.listener import Listener, choose_audio
from videoflow.stage import HeardSound, PassConsumer, VideoHeader, VideoSummary

if TYPE_CHECKING:
    from workers.decode import Sink

#: Bytes of audio packets that may wait for the first frame.
MAX_WAITING_BYTES = 64 << 20


class PassEar:
    """Hands the sound of one pass to the consumers that hear. ``streams``: the audio streams to demux."""

    def __init__(
        self,
        container: av.container.InputContainer,
        consumers: Sequence[PassConsumer],
        sink: Sink,
        failures: dict[str, MediaError],
    ) -> None:
        self._consumers, self._sink, self._failures = consumers, sink, failures
        self._listeners: dict[int, Listener] = {}
        self._hearers: dict[int, list[PassConsumer]] = {}
        for consumer in (c for c in consumers if c.hears):
            stream = choose_audio(container, consumer.audio_stream())
            if stream is not None:
                self._listeners.setdefault(stream.index, Listener(stream))
                self._hearers.setdefault(stream.index, []).append(consumer)
        # One without a table makes nothing: it rides along to know how far the pass is, whatever is heard.
        self._along = [c for c in consumers if not c.table]
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._begun = self._late = False

    @classmethod
    def of(
        cls,
        container: av.container.InputContainer,
        consumers: Sequence[PassConsumer],
        sink: Sink,
        failures: dict[str, MediaError],
    ) -> PassEar | None:
        """The ear of a pass; None if nobody hears, or there is nothing to hear."""
        ear = cls(container, consumers, sink, failures) if any(c.hears for c in consumers) else None
        return ear if ear is not None and ear.streams else None

    @property
    def streams(self) -> tuple[Any, ...]:
        return tuple(listener.stream for listener in self._listeners.values())

    def take(self, packet: Any) -> None:
        """One packet of a stream that is heard."""
        if self._late:
            return
        if self._begun:
            self._decode(packet)
            return
        self._waiting.append(packet)
        self._waiting_bytes += packet.size
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._late = True
            self._waiting.clear()

    def begin(self) -> None:
        """The consumers know the video's start: what waited is decoded."""
        if not self._begun:
            self._begun = True
            waiting, self._waiting = self._waiting, []
            for packet in waiting:
                self._decode(packet)

    def finish(self, path: str | Path) -> int:
        """After the last packet: consumers of a stream that cannot be decoded have failed. How many packets failed."""
        self.begin()
        if self._late:
            return self._again(path)
        for index, listener in self._listeners.items():
            problem = listener.problem()
            if problem is not None:
                self._failures.update({c.name: problem for c in self._hearers[index] if c.name not in self._failures})
        return sum(listener.num_failed for listener in self._listeners.values())

    def _again(self, path: str | Path) -> int:
        with open_media(path) as container:
            ear = PassEar(container, self._consumers, self._sink, self._failures)
            ear.begin()
            return ear.listen(container, path)

    def listen(self, container: av.container.InputContainer, path: str | Path) -> int:
        """Read a file for its sound only; how many packets failed. A demuxer that breaks off ends the streams."""
        broke_off = 0
        try:
            for packet in container.demux(*self.streams) if self.streams else ():
                self.take(packet)
        except av.error.InvalidDataError:
            broke_off = 1
        except av.error.FFmpegError as e:
            raise MediaError("io_error", f"reading the audio stopped: {e.strerror}") from e
        return self.finish(path) + broke_off

    def _decode(self, packet: Any) -> None:
        index = packet.stream.index
        try:
            for sound in self._listeners[index].decode(packet):
                self._tell(index, sound)
        except MediaError as e:
            self._failures.update({c.name: e for c in self._hearers[index] if c.name not in self._failures})

    def _tell(self, index: int, sound: HeardSound) -> None:
        for consumer in self._along:
            consumer.hear(sound)
        for consumer in self._hearers[index]:
            if consumer.name in self._failures:
                continue
            try:
                for row in consumer.hear(sound) or ():
                    self._sink(consumer.name, row)
            except MediaError as e:
                self._failures[consumer.name] = e


def hear_alone(
    path: str | Path,
    header: VideoHeader,
    consumers: Sequence[PassConsumer],
    sink: Sink,
    failures: dict[str, MediaError],
) -> VideoSummary:
    """A pass that decodes no picture, over a video whose start an earlier one knows.

    Raises:
        MediaError: the file cannot be read.
    """
    for consumer in consumers:
        consumer.begin(header)
    with open_media(path) as container:
        ear = PassEar(container, consumers, sink, failures)
        ear.begin()
        failed = ear.listen(container, path)
    return VideoSummary(0, header.start_pts, (), failed)
