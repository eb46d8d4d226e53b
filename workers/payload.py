"""The payload: chosen clips' frames from the source, at the rate and size a trainer wants, as closed-GOP H.264 or JPEG.

Frames are those of the payload's own grid: grid time k of a rate is start + k / rate, its frame the last shown one at
or before it, stored once; ``fps: native`` takes every shown frame of the clip. Size and colour follow the rules of the
frame cache. Which clips are chosen is no part of the fingerprint: choosing more of them computes only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from videoflow.keys import digest, digest_bytes
from videoflow.stage import Product, ShownFrame, SourceClip, SourceStage, StageParams
from videoflow.store import schemas
from videoflow.store.blobs import pack_records
from videoflow.timeline import Grid, parse_rate
from workers.canary import decoder_identity
from workers.h264 import ASSUMED_RATE, H264Encoder, encoder_identity
from workers.jpeg import encode_picture

NATIVE = "native"
#: Bits a pixel of H.264 at crf 18 (half of it for 6 more), and bytes a pixel of JPEG at quality 90, of the real footage
#: in benchmarks/products_payload.py; for sizing blocks and for plans.
H264_BITS, JPEG_BYTES = 0.16, 0.16


class PayloadParams(StageParams):
    """Parameters of the payload.

    ``fps``: frames a second, a number, a fraction such as "24000/1001", or native; ``short_side``: pixels, never
    enlarged; ``codec``: h264 or jpeg; ``gop``: frames from one keyframe to the next; ``crf``, ``preset``: of H.264;
    ``quality``: of JPEG; ``where``: SQL condition on clip columns and scores; ``count``: at most so many clips.
    """

    fps: str = NATIVE
    short_side: int = Field(720, ge=16, le=8192)
    codec: Literal["h264", "jpeg"] = "h264"
    gop: int = Field(12, ge=1, le=600)
    crf: int | None = Field(None, ge=0, le=51)
    preset: (
        Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow"] | None
    ) = None
    quality: int | None = Field(None, ge=1, le=100)
    where: str | None = Field(None, exclude=True)
    count: int | None = Field(None, ge=1, exclude=True)

    @field_validator("fps", mode="before")
    @classmethod
    def _rate(cls, value: object) -> str:
        return NATIVE if value == NATIVE else str(parse_rate(value))

    @model_validator(mode="after")
    def _of_its_codec(self) -> Self:
        others = {"h264": ("quality",), "jpeg": ("crf", "preset")}[self.codec]
        given = [name for name in others if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{given[0]} does not go with codec {self.codec}")
        return self


class Payload(SourceStage):
    """One row a chosen clip."""

    name: ClassVar[str] = "payload"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "payload"
    Params: ClassVar[type[StageParams]] = PayloadParams

    def __init__(self, params: StageParams | None = None) -> None:
        super().__init__(self.resolve(params if params is not None else PayloadParams()))

    @classmethod
    def resolve(cls, params: Any) -> PayloadParams:
        """The same parameters with the defaults of their codec."""
        defaults: dict[str, Any] = {"crf": 18, "preset": "veryfast"} if params.codec == "h264" else {"quality": 90}
        unset = {name: value for name, value in defaults.items() if getattr(params, name) is None}
        settled: PayloadParams = params.model_copy(update=unset)
        return settled

    def schema(self) -> pa.Schema:
        return schemas.PAYLOAD

    def identity(self) -> dict[str, str]:
        p = self.params
        coded = {"encoder": encoder_identity(p.crf, p.preset, p.gop)} if p.codec == "h264" else {}
        return {"decoder": decoder_identity(), **coded}

    @property
    def where(self) -> str | None:
        return self.params.where

    @property
    def count(self) -> int | None:
        return self.params.count

    @property
    def rate(self) -> Fraction | None:
        """Frames a second of its grid; None: every shown frame."""
        return None if self.params.fps == NATIVE else Fraction(self.params.fps)

    def bytes_per_second(self, width: int, height: int, fps: float) -> float:
        scale = min(1.0, self.params.short_side / max(1, min(width, height)))
        pixels = width * height * scale**2
        rate = fps if self.rate is None else min(fps, float(self.rate))
        if self.params.codec == "jpeg":
            return pixels * rate * JPEG_BYTES
        return pixels * rate * H264_BITS / 8 * 2.0 ** ((18 - (self.params.crf or 0)) / 6)

    def wanted(self, clip: SourceClip) -> Sequence[int]:
        """pts of the frames that are stored: of the grid's, or all."""
        if self.rate is None:
            return clip.pts
        grid = Grid(clip.start_pts, clip.time_base, self.rate)
        positions = grid.frame_positions(clip.pts, grid.indices(clip.t0_pts, clip.t1_pts))
        return [clip.pts[p] for p in dict.fromkeys(positions) if p >= 0]

    def open(self, clip: SourceClip) -> PayloadMaker:
        return PayloadMaker(self.params, self.rate, clip)


class PayloadMaker:
    """Encodes one clip's frames. Memory: the encoded clip."""

    def __init__(self, params: PayloadParams, rate: Fraction | None, clip: SourceClip) -> None:
        self._params, self._rate, self._clip = params, rate, clip
        self._size: tuple[int, int] | None = None
        self._encoder: H264Encoder | None = None
        self._pts: list[int] = []
        self._encoded: list[bytes] = []

    def see(self, frame: ShownFrame) -> None:
        """Encode a frame.

        Raises:
            MediaError: it cannot be encoded.
        """
        p = self._params
        if self._size is None:
            self._size = frame.picture.geometry.fit_short_side(p.short_side)
        self._pts.append(frame.pts)
        if p.codec == "jpeg":
            self._encoded.append(encode_picture(frame.picture, self._size, p.quality or 90))
            return
        if self._encoder is None:
            rate = self._rate or ASSUMED_RATE
            self._encoder = H264Encoder(self._size, rate=rate, crf=p.crf or 0, preset=p.preset or "veryfast", gop=p.gop)
        self._encoded += self._encoder.encode(frame.picture)

    def finish(self) -> Product:
        """The clip's row; the digest is that of its bytes."""
        if self._encoder is not None:
            self._encoded += self._encoder.flush()
        assert self._size is not None
        data, offsets = pack_records(zip(self._pts, self._encoded, strict=True))
        clip, rate = self._clip, self._rate
        indices = range(len(self._pts))
        if rate is not None:
            indices = Grid(clip.start_pts, clip.time_base, rate).indices(clip.t0_pts, clip.t1_pts)
        blob_digest = digest_bytes(data)
        row = {
            "clip_key": clip.clip_key,
            "n": len(self._pts),
            "width": self._size[0],
            "height": self._size[1],
            "fps_num": rate.numerator if rate else 0,
            "fps_den": rate.denominator if rate else 1,
            "first_grid": indices.start,
            "grid_count": len(indices),
            "codec": self._params.codec,
            "gop": self._params.gop,
            "pts": self._pts,
            "offsets": offsets,
            "digest": blob_digest,
            "data": data,
        }
        return Product(rows=[row], digest=digest("payload", clip.clip_key, self._pts, blob_digest))
