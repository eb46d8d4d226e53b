"""A user's own clip stage that takes its time, so that a kill can hit it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from videoflow.keys import digest
from videoflow.stage import ClipFrames, ClipStage, Product, StageParams
from videoflow.store.schemas import ARTIFACT_HEAD


class SlowLumaParams(StageParams):
    seconds: float = 0.0


class SlowLuma(ClipStage):
    """The sum of a clip's pixels: an integer, so that digests hold."""

    name = "slow_luma"
    version = 1
    table = "slow_luma"
    batch_size = 4
    Params = SlowLumaParams

    def schema(self) -> pa.Schema:
        return pa.schema([*ARTIFACT_HEAD, pa.field("clip_key", pa.string()), pa.field("luma", pa.int64())])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        time.sleep(self.params.seconds * len(clips))
        sums = [int(c.video.sum(dtype="uint64")) for c in clips]
        rows = [{"clip_key": c.clip_key, "luma": s} for c, s in zip(clips, sums, strict=True)]
        return [Product([row], digest(row)) for row in rows]
