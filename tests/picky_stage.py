"""A user's own stage of videos with a fault of its own: it stumbles over one kind of video."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from videoflow.keys import digest
from videoflow.stage import Item, Product, VideoStage
from videoflow.store.schemas import ARTIFACT_HEAD


class Picky(VideoStage):
    """Raises KeyError over videos of 33 frames."""

    name: ClassVar[str] = "picky"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "picky"
    inputs: ClassVar[tuple[str, ...]] = ("probe",)

    def schema(self) -> pa.Schema:
        return pa.schema([*ARTIFACT_HEAD, pa.field("n", pa.int64())])

    def process(self, item: Item) -> Product:
        (row,) = item.rows["probe"]
        n = {30: 1, 36: 2}[row["num_frames"]]
        return Product([{"n": n}], digest(n))
