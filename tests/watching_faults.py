"""Stages and a source that are slow on purpose, named by dotted path, so that whoever watches has something to find."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from videoflow.keys import digest
from videoflow.stage import (
    ClipFrames,
    ClipStage,
    PassConsumer,
    Product,
    ShownFrame,
    StageParams,
    VideoHeader,
    VideoSummary,
)
from videoflow.store.schemas import ARTIFACT_HEAD


class SlowParams(StageParams):
    seconds: float = 0.02


class SlowRider(PassConsumer):
    """Sleeps at every frame."""

    name: ClassVar[str] = "slow_rider"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "slow_rider"
    Params: ClassVar[type[StageParams]] = SlowParams

    def schema(self) -> pa.Schema:
        return pa.schema(ARTIFACT_HEAD)

    def begin(self, video: VideoHeader) -> None: ...

    def see(self, frame: ShownFrame) -> None:
        time.sleep(self.params.seconds)

    def finish(self, summary: VideoSummary) -> Product:
        return Product(digest="0" * 32)


class BusyDecoder(SlowRider):
    """Makes the decoder itself slow, in the child that it is set up in: every frame keeps a core busy for a while."""

    name: ClassVar[str] = "busy_decoder"
    table: ClassVar[str] = "busy_decoder"

    def setup(self) -> None:
        slow_frames(self._wait)

    def see(self, frame: ShownFrame) -> None: ...

    def _wait(self) -> None:
        until = time.thread_time() + self.params.seconds
        while time.thread_time() < until:
            pass


class WaitingDecoder(BusyDecoder):
    """The same off the cores, as when the file's bytes do not come."""

    name: ClassVar[str] = "waiting_decoder"
    table: ClassVar[str] = "waiting_decoder"

    def _wait(self) -> None:
        time.sleep(self.params.seconds)


def slow_frames(wait: Any) -> None:
    """Have every decoder of this process wait before each frame."""
    from videoflow.media.decoder import Decoder

    real = Decoder.frames

    def frames(self: Any, *args: Any, **kwargs: Any) -> Any:
        for frame in real(self, *args, **kwargs):
            wait()
            yield frame

    Decoder.frames = frames  # type: ignore[method-assign]


class SlowModel(ClipStage):
    """Sleeps at every clip."""

    name: ClassVar[str] = "slow_model"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "slow_model"
    Params: ClassVar[type[StageParams]] = SlowParams

    def schema(self) -> pa.Schema:
        return pa.schema([*ARTIFACT_HEAD, pa.field("clip_key", pa.string())])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        time.sleep(self.params.seconds * len(clips))
        return [Product([{"clip_key": c.clip_key}], digest(c.clip_key)) for c in clips]


class SlowFiles(LocalFileSystem):
    """Local files behind a slow line: ``slowfiles:///path``. Only whole files are slow, so that listing is not."""

    protocol = "slowfiles"
    seconds: ClassVar[float] = 0.0

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        super().get_file(rpath, lpath, **kwargs)

    def unstrip_protocol(self, name: str) -> str:
        return f"slowfiles://{self._strip_protocol(name)}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix("slowfiles://"))


class BareEngine:
    """An engine of a user's own that keeps the contract and tells nothing of its workers."""

    def __init__(self, *, workers: int, memory_bytes: int | None = None) -> None:
        self._memory = memory_bytes

    def run(self, units: Sequence[Any]) -> Iterator[Any]:
        from workers.run_unit import UnitRunner

        runner = UnitRunner(memory_bytes=self._memory)
        try:
            for unit in units:
                yield runner.run(unit)
        finally:
            runner.close()

    def close(self) -> None: ...
