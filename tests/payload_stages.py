"""Stages on the payload, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pyarrow as pa

from videoflow.keys import digest
from videoflow.stage import ClipFrames, ClipStage, Product, StageParams
from videoflow.store import schemas
from videoflow.testing import read_barcode


class BarcodeParams(StageParams):
    """``fps``: of the frames that are read; None: all. ``tag``: makes another fingerprint."""

    fps: str | None = None
    tag: str = ""


class Barcodes(ClipStage):
    """Reads the number on every frame of a clip's payload."""

    name, version, table = "barcodes", 1, "barcodes"
    inputs = ("clips", "payload")
    Params = BarcodeParams

    @property
    def fps(self) -> Fraction | None:
        return None if self.params.fps is None else Fraction(self.params.fps)

    def schema(self) -> pa.Schema:
        own = [
            pa.field("clip_key", schemas.KEY),
            pa.field("numbers", pa.list_(pa.int32())),
            pa.field("seconds", pa.list_(pa.float64())),
        ]
        return pa.schema([*schemas.ARTIFACT_HEAD, *own])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        made = []
        for clip in clips:
            numbers = [read_barcode(frame) for frame in clip.video]
            row = {"clip_key": clip.clip_key, "numbers": numbers, "seconds": clip.pts_seconds.tolist()}
            made.append(Product(rows=[row], digest=digest("barcodes", clip.clip_key, numbers)))
        return made


class FirstNumber(ClipStage):
    """Scores a clip by the number on its first cached frame."""

    name, version, table = "first", 1, "first"

    def schema(self) -> pa.Schema:
        return pa.schema([*schemas.ARTIFACT_HEAD, pa.field("clip_key", schemas.KEY), pa.field("number", pa.int32())])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        numbers = [read_barcode(clip.video[0]) for clip in clips]
        return [
            Product(rows=[{"clip_key": clip.clip_key, "number": n}], digest=digest(clip.clip_key, n))
            for clip, n in zip(clips, numbers, strict=True)
        ]
