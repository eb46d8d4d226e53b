"""Quality per grid frame: motion, sharpness, luma and black share, from a small luma picture.

The picture is at most 160 pixels on its long side, in stored orientation, and its size is fixed by the video's first
frame. Everything is counted in integers first, so the digest holds on every machine; the clips stage pools the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import cv2
import numpy as np
import pyarrow as pa
from pydantic import field_validator

from videoflow.keys import digest
from videoflow.stage import Margin, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store import schemas
from videoflow.timeline import Grid, parse_rate, round_half_up

#: Long side of the luma picture in pixels: whole-number shrinking of common sizes, ~14,000 pixels.
LONG_SIDE = 160
#: A pixel at or below this luma (of 255) is black: ``pixel_black_th`` = 0.10 of FFmpeg's blackdetect.
BLACK_LUMA = 25


class QualityParams(StageParams):
    """``fps``: grid rate in frames per second, a number or a fraction such as "30000/1001"."""

    fps: str = "8"

    @field_validator("fps", mode="before")
    @classmethod
    def _rate(cls, value: object) -> str:
        return str(parse_rate(value))


def measure(luma: np.ndarray, before: np.ndarray | None) -> dict[str, int]:
    """Integer sums over a luma picture, uint8 (h, w).

    Returns:
        ``motion``: |difference| to the picture before (0 for the first) · ``laplacian``, ``laplacian_squared``: of the
        3 × 3 Laplacian · ``luma`` · ``black``: pixels at most BLACK_LUMA.
    """
    edges = cv2.Laplacian(luma, cv2.CV_16S, ksize=1).astype(np.int64)
    return {
        "motion": 0 if before is None else int(cv2.absdiff(luma, before).sum(dtype=np.int64)),
        "laplacian": int(edges.sum()),
        "laplacian_squared": int((edges * edges).sum()),
        "luma": int(luma.sum(dtype=np.int64)),
        "black": int(np.count_nonzero(luma <= BLACK_LUMA)),
    }


def values_of(sums: dict[str, int], pixels: int) -> dict[str, float]:
    """What is stored of a frame.

    ``motion``: mean |difference|, 0…1 · ``sharpness``: variance of the Laplacian, grey levels squared · ``luma``: mean,
    0…1 · ``black``: share of pixels, 0…1.
    """
    variance = Fraction(sums["laplacian_squared"], pixels) - Fraction(sums["laplacian"], pixels) ** 2
    return {
        "motion": sums["motion"] / (255 * pixels),
        "sharpness": float(variance),
        "luma": sums["luma"] / (255 * pixels),
        "black": sums["black"] / pixels,
    }


class Quality(PassConsumer):
    """Measures every grid frame; one row a video."""

    name: ClassVar[str] = "quality"
    version: ClassVar[int] = 2
    table: ClassVar[str] = "quality"
    Params: ClassVar[type[StageParams]] = QualityParams

    def schema(self) -> pa.Schema:
        return schemas.QUALITY

    def identity(self) -> dict[str, str]:
        from workers.canary import decoder_identity

        return {"decoder": decoder_identity()}

    def begin(self, video: VideoHeader) -> None:
        self._video = video
        self._grid = Grid(video.start_pts, video.time_base, Fraction(self.params.fps))
        self._size: tuple[int, int] | None = None
        self._before: np.ndarray | None = None
        self._pts: list[int] = []
        self._sums: list[dict[str, int]] = []

    def see(self, frame: ShownFrame) -> None:
        if not self._grid.is_kept(frame.pts, frame.next_pts):
            return
        if self._size is None:
            self._size = small_size(frame.picture.stored_size)
        luma = np.array(frame.picture.luma(*self._size))  # a copy: the decoder's memory is only lent
        self._pts.append(frame.pts)
        self._sums.append(measure(luma, self._before))
        self._before = luma

    def finish(self, summary: VideoSummary) -> Product:
        """One row of lists, one value per grid frame. The digest is over the pts and the integer sums."""
        pixels = self._size[0] * self._size[1] if self._size else 1
        self._before = None
        if self._video.window is None:
            return _product(pixels, self._pts, self._sums)
        own = [(p, s) for p, s in zip(self._pts, self._sums, strict=True) if self._video.owns(p)]
        return Product(extra={"pixels": pixels, "pts": [p for p, _ in own], "sums": [s for _, s in own]})

    def margin(self) -> Margin:
        """Motion is against the grid frame before."""
        return Margin(frames=1, seconds=1 / Fraction(self.params.fps))

    def join(self, parts: Sequence[Product]) -> Product:
        """One row of all windows' lists."""
        pts = [p for part in parts for p in part.extra["pts"]]
        sums = [s for part in parts for s in part.extra["sums"]]
        return _product(parts[0].extra["pixels"], pts, sums)


def _product(pixels: int, pts: list[int], sums: list[dict[str, int]]) -> Product:
    values = [values_of(s, pixels) for s in sums]
    row: dict[str, Any] = {"pts": pts}
    for name in ("motion", "sharpness", "luma", "black"):
        row[name] = [v[name] for v in values]
    return Product(rows=[row], digest=digest("quality", pixels, pts, sums))


def small_size(stored_size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) with the long side at most LONG_SIDE, never enlarged."""
    scale = min(Fraction(1), Fraction(LONG_SIDE, max(stored_size)))
    width, height = (max(1, round_half_up(side * scale)) for side in stored_size)
    return width, height
