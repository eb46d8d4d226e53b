"""The frame cache: JPEG pictures of the grid frames, packed into chunks of a few seconds.

Chunk rows leave as soon as they are full, so memory stays constant. Damaged frames are cached like all others; which
pts ranges of a chunk are damaged is only known at the end of the pass and filled in when the rows are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from videoflow.keys import digest, digest_bytes
from videoflow.stage import Margin, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store import schemas
from videoflow.store.blobs import pack_records
from videoflow.timeline import Grid, chunk_of, parse_rate
from workers.canary import decoder_identity
from workers.jpeg import encode_picture


class FramesParams(StageParams):
    """Parameters of the frame cache.

    ``fps``: grid rate; ``short_side``: of the cached picture, never enlarged; ``quality``: JPEG; ``chunk_seconds``:
    grain.
    """

    fps: str = "8"
    short_side: int = Field(256, ge=16, le=4096)
    quality: int = Field(90, ge=1, le=100)
    chunk_seconds: int = Field(4, ge=1, le=60)

    @field_validator("fps", mode="before")
    @classmethod
    def _rate(cls, value: object) -> str:
        return str(parse_rate(value))


class Frames(PassConsumer):
    """Encodes grid frames and hands over one row a chunk."""

    name: ClassVar[str] = "frames"
    version: ClassVar[int] = 2
    table: ClassVar[str] = "frames"
    Params: ClassVar[type[StageParams]] = FramesParams

    def schema(self) -> pa.Schema:
        return schemas.FRAMES

    def identity(self) -> dict[str, str]:
        return {"decoder": decoder_identity()}

    def begin(self, video: VideoHeader) -> None:
        self._video = video
        self._grid = Grid(video.start_pts, video.time_base, Fraction(self.params.fps))
        self._size: tuple[int, int] | None = None
        self._chunk = 0
        self._held: list[tuple[int, bytes]] = []
        self._digests: list[str] = []

    def see(self, frame: ShownFrame) -> Iterator[dict[str, Any]]:
        if not (self._video.owns(frame.pts) and self._grid.is_kept(frame.pts, frame.next_pts)):
            return
        if self._size is None:
            self._size = frame.picture.geometry.fit_short_side(self.params.short_side)
        v = self._video
        chunk = chunk_of(
            frame.pts, start_pts=v.start_pts, time_base=v.time_base, chunk_seconds=Fraction(self.params.chunk_seconds)
        )
        if chunk != self._chunk:
            yield from self._flush()
            self._chunk = chunk
        self._held.append((frame.pts, encode_picture(frame.picture, self._size, self.params.quality)))

    def finish(self, summary: VideoSummary) -> Product:
        rows = list(self._flush())
        return Product(rows=rows, digest=digest("frames", *self._digests), extra={"digests": self._digests})

    def margin(self) -> Margin:
        """Windows of whole chunks; no frame needs its neighbours."""
        return Margin(align_seconds=self.params.chunk_seconds)

    def join(self, parts: Sequence[Product]) -> Product:
        """All rows are written; the digest is over those of the chunks."""
        return Product(digest=digest("frames", *(d for part in parts for d in part.extra["digests"])))

    def _flush(self) -> Iterator[dict[str, Any]]:
        if not self._held:
            return
        data, offsets = pack_records(self._held)
        blob_digest = digest_bytes(data)
        self._digests.append(blob_digest)
        assert self._size is not None
        yield {
            "chunk": self._chunk,
            "n": len(self._held),
            "width": self._size[0],
            "height": self._size[1],
            "pts": [pts for pts, _ in self._held],
            "offsets": offsets,
            "digest": blob_digest,
            "data": data,
        }
        self._held = []

    @staticmethod
    def pictures(path: str, params: FramesParams) -> Iterator[tuple[int, np.ndarray]]:
        """(pts, RGB) of every frame these parameters would cache, before JPEG; for tests and for people."""
        from workers.decode import decode_pictures

        return decode_pictures(path, fps=params.fps, short_side=params.short_side)
