"""A consumer that misbehaves on purpose: what a broken decoder does to its process."""

from __future__ import annotations

import time
from typing import ClassVar, Literal

import pyarrow as pa

from videoflow.stage import PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store.schemas import ARTIFACT_HEAD
from videoflow.testing import misbehave


class PoisonParams(StageParams):
    """``how`` it misbehaves on videos of exactly ``num_frames`` frames; all others pass."""

    how: Literal["hang", "crash", "allocate", "raise", "crawl"] = "hang"
    num_frames: int = 33
    seconds_a_frame: float = 0.0


class Poison(PassConsumer):
    """Misbehaves at the last frame; with ``crawl`` it is only slow, at every one."""

    name: ClassVar[str] = "poison"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "poison"
    Params: ClassVar[type[StageParams]] = PoisonParams

    def schema(self) -> pa.Schema:
        return pa.schema(ARTIFACT_HEAD)

    def begin(self, video: VideoHeader) -> None:
        self._seen = 0

    def see(self, frame: ShownFrame) -> None:
        self._seen += 1
        if self.params.how == "crawl":
            time.sleep(self.params.seconds_a_frame)

    def finish(self, summary: VideoSummary) -> Product:
        if self._seen == self.params.num_frames and self.params.how != "crawl":
            misbehave(self.params.how)
        return Product(digest="0" * 32)
