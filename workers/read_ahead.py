"""Cached frames of clips, read and unpacked one batch ahead of the model that looks at them.

The loader's reader and its decode engine, on a thread of their own: while the model works (on a GPU, or in native code
that lets other threads run), the next batch comes in. What the worker waits for a batch is told apart into reading and
unpacking, in the proportion in which the thread spent its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from videoflow.errors import BadSample
from videoflow.loader.engine import DecodeEngine
from videoflow.loader.reader import ClipReader
from videoflow.stage import ClipFrames
from videoflow.telemetry.meter import Division, count, current
from videoflow.unit import ClipItem


@dataclass(frozen=True)
class _Loaded:
    """A batch's frames, or what is wrong with one of its clips."""

    frames: list[ClipFrames] | BadSample
    num_bytes: int
    read_ns: int
    unpack_ns: int


class ReadAhead:
    """Reads clips through one thread. Use as a context manager."""

    def __init__(self, reader: ClipReader, engine: DecodeEngine) -> None:
        self._reader = reader
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def batches(
        self, batches: Sequence[Sequence[ClipItem]]
    ) -> Iterator[tuple[Sequence[ClipItem], list[ClipFrames] | BadSample]]:
        """Every batch with its frames, in order; the one after it is on its way meanwhile."""
        coming = self._thread.submit(self._load, batches[0]) if batches else None
        for n, batch in enumerate(batches):
            assert coming is not None
            loaded = _wait_for(coming)
            if n + 1 < len(batches):
                coming = self._thread.submit(self._load, batches[n + 1])
            yield batch, loaded

    def alone(self, item: ClipItem) -> list[ClipFrames] | BadSample:
        """One clip's frames, read now."""
        return _wait_for(self._thread.submit(self._load, [item]))

    def _load(self, batch: Sequence[ClipItem]) -> _Loaded:
        began_ns = time.perf_counter_ns()
        try:
            encoded = self._reader.read([i.clip for i in batch], [i.wanted for i in batch])
            read_ns = time.perf_counter_ns() - began_ns
            frames = []
            for item, clip in zip(batch, encoded, strict=True):
                (video,) = self._engine.decode([clip], size=None, fit="crop")
                frames.append(ClipFrames(item.clip.clip_key, item.video_key, video, clip.pts_seconds))
        except BadSample as e:
            return _Loaded(e, 0, time.perf_counter_ns() - began_ns, 0)
        num_bytes = sum(len(p) for clip in encoded for p in clip.payloads)
        return _Loaded(frames, num_bytes, read_ns, time.perf_counter_ns() - began_ns - read_ns)


def _wait_for(coming: Future[_Loaded]) -> list[ClipFrames] | BadSample:
    meter = current()
    if meter is None:
        return coming.result().frames
    began_ns = time.perf_counter_ns()

    def divide() -> Division:
        if not coming.done() or coming.exception() is not None:
            return Division({}, {})
        loaded = coming.result()
        waited_ns = time.perf_counter_ns() - began_ns
        return Division({"unpack": waited_ns * loaded.unpack_ns // max(1, loaded.read_ns + loaded.unpack_ns)}, {})

    with meter.divided("read", divide):
        loaded = coming.result()
    count(bytes_read=loaded.num_bytes)
    return loaded.frames
