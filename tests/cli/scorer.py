"""A user's own stage, small: the mean brightness of a clip's pictures."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from videoflow.keys import digest
from videoflow.stage import ClipFrames, ClipStage, Product, StageParams
from videoflow.store.schemas import ARTIFACT_HEAD, embeddings


class MeanLumaParams(StageParams):
    gain: float = 1.0


class MeanLuma(ClipStage):
    name = "mean_luma"
    version = 1
    table = "mean_luma"
    Params = MeanLumaParams

    def schema(self) -> pa.Schema:
        return pa.schema([*ARTIFACT_HEAD, pa.field("clip_key", pa.string()), pa.field("luma", pa.float32())])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        return [
            Product([{"clip_key": c.clip_key, "luma": float(c.video.mean()) * self.params.gain}], digest(c.clip_key))
            for c in clips
        ]


class MeanColour(ClipStage):
    """An embedder that costs nothing: the mean colour of a clip's pictures."""

    name = "mean_colour"
    version = 1
    table = "embeddings"

    def schema(self) -> pa.Schema:
        return embeddings(3, pa.float32())

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        products = []
        for c in clips:
            mean = c.video.astype("float32").mean(axis=(0, 1, 2)) + 1
            vector = (mean / (mean**2).sum() ** 0.5).tolist()
            row = {"clip_key": c.clip_key, "num_frames": len(c.video), "vector": vector}
            products.append(Product([row], digest(c.clip_key)))
        return products
