"""Embeddings of clips: features of their cached frames, pooled, one unit vector a clip.

A frame's features are those of the model's last pooled layer; a clip's vector is their mean, L2-normalised, float32.
The digest leaves the floats out: fp32 moves in the last digits with the batch, bfloat16 with the kind of processor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import cv2
import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from videoflow.errors import MediaError, MissingExtra
from videoflow.keys import digest
from videoflow.stage import ClipFrames, ClipStage, Product, Resources, StageParams
from videoflow.store import schemas
from videoflow.timeline import parse_rate, round_half_up
from workers.machine import has_fast_bf16

if TYPE_CHECKING:
    import torch

#: Share of the short side that the middle square takes: 224 / (224 + 32), TensorFlow's evaluation crop.
CROP = Fraction(224, 256)
#: Frames that go through the model at once.
FRAMES_AT_ONCE = 32


class EmbedParams(StageParams):
    """``model``: efficientnet-lite0 or package.module:factory (see workers/models.py).

    ``weights``: local path of a state dict; not part of the fingerprint, the digest of its bytes is. ``fps``: frames
    per second of the clip that are looked at. ``dtype``: auto is bfloat16 where the processor is fast at it, else
    float32; never in a fingerprint. ``size``: side of the model's pictures in pixels.
    """

    model: str = "efficientnet-lite0"
    weights: str | None = Field(default=None, exclude=True)
    fps: str = "1"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    size: int = Field(default=224, ge=32, le=1024)

    @field_validator("fps", mode="before")
    @classmethod
    def _rate(cls, value: object) -> str:
        return str(parse_rate(value))


def need_torch() -> None:
    """Raises MissingExtra where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", needed_for="the embed stage", extra="embed")


def best_dtype() -> Literal["float32", "bfloat16"]:
    """bfloat16 on a GPU or on a CPU with instructions for it (AVX512-BF16 or AMX), else float32."""
    need_torch()
    return "bfloat16" if has_fast_bf16() else "float32"


def prepare(frame: np.ndarray, size: int) -> np.ndarray:
    """The middle square (7/8 of the short side) at ``size`` pixels: uint8 (h, w, 3) → uint8 (size, size, 3).

    Cached frames of short side 256 need no scaling for a size of 224. Larger ones shrink by area, smaller ones grow
    bicubically.
    """
    height, width = frame.shape[:2]
    side = max(1, round_half_up(min(height, width) * CROP))
    top, left = (height - side) // 2, (width - side) // 2
    square = frame[top : top + side, left : left + side]
    if side == size:
        return square
    return np.asarray(
        cv2.resize(square, (size, size), interpolation=cv2.INTER_AREA if side > size else cv2.INTER_CUBIC)
    )


class Embed(ClipStage):
    """One vector a clip. ``auto`` is settled when the stage is made, so ``params`` always names the dtype in use."""

    name: ClassVar[str] = "embed"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "embeddings"
    Params: ClassVar[type[StageParams]] = EmbedParams
    resources: ClassVar[Resources] = Resources(cpus=1.0)
    batch_size: ClassVar[int] = 8

    def __init__(self, params: StageParams | None = None) -> None:
        super().__init__(self.resolve(params if params is not None else EmbedParams()))
        self._model: torch.nn.Module | None = None

    @classmethod
    def resolve(cls, params: Any) -> EmbedParams:
        """The same parameters with ``auto`` replaced by the dtype this machine would use."""
        dtype = best_dtype() if params.dtype == "auto" else params.dtype
        settled: EmbedParams = params.model_copy(update={"dtype": dtype})
        return settled

    @property
    def fps(self) -> Fraction | None:
        return Fraction(self.params.fps)

    def schema(self) -> pa.Schema:
        need_torch()
        from workers.models import embedding_dim

        p = self.params
        return schemas.embeddings(embedding_dim(p.model, p.weights, size=p.size), pa.float32())

    def identity(self) -> dict[str, str]:
        need_torch()
        from workers.models import weights_digest

        return {"model": self.params.model, "weights": weights_digest(self.params.model, self.params.weights)}

    def setup(self) -> None:
        need_torch()
        import copy

        import torch

        from workers.models import load_model

        model = copy.deepcopy(load_model(self.params.model, self.params.weights))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._mean, self._std = (
            torch.as_tensor(getattr(model, name, default), dtype=torch.float32, device=device).reshape(-1, 1, 1)
            for name, default in (("pixel_mean", 0.0), ("pixel_std", 255.0))
        )
        dtype = getattr(torch, self.params.dtype)
        self._model = model.to(device=device, dtype=dtype).to(memory_format=torch.channels_last)

    def teardown(self) -> None:
        self._model = None

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        """One product a clip; a clip without frames is filtered. The digest is over the clip key and the frames' times.

        Raises:
            MediaError: the model gave something that is no finite vector.
        """
        counts = [len(clip.video) for clip in clips]
        frames = [prepare(frame, self.params.size) for clip in clips for frame in clip.video]
        features = self.features(frames)
        products = []
        start = 0
        for clip, count in zip(clips, counts, strict=True):
            if count:
                products.append(_product(clip, features[start : start + count]))
            else:
                products.append(Product(filtered="no_cached_frame"))
            start += count
        return products

    def features(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        """float32 (N, D) features of prepared frames, uint8 (size, size, 3) each."""
        if self._model is None:
            self.setup()
        parts = [self._forward(np.stack(frames[i : i + FRAMES_AT_ONCE])) for i in range(0, len(frames), FRAMES_AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    def _forward(self, batch: np.ndarray) -> np.ndarray:
        import torch

        assert self._model is not None
        with torch.inference_mode():
            # (N, H, W, 3) seen as (N, 3, H, W) is channels_last already.
            pixels = torch.from_numpy(batch).to(self._mean.device).permute(0, 3, 1, 2).float()
            x = ((pixels - self._mean) / self._std).to(getattr(torch, self.params.dtype))
            return np.asarray(self._model(x.contiguous(memory_format=torch.channels_last)).float().cpu().numpy())


def _product(clip: ClipFrames, features: np.ndarray) -> Product:
    mean = features.mean(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(mean))
    if not np.isfinite(length) or length == 0.0:
        raise MediaError(
            "model_error", f"clip {clip.clip_key}: the model gave no finite vector for {len(features)} frames"
        )
    row = {
        "clip_key": clip.clip_key,
        "num_frames": len(features),
        "vector": (mean / length).astype(np.float32),
    }
    times_us = np.rint(np.asarray(clip.pts_seconds) * 1e6).astype(np.int64).tolist()
    return Product(rows=[row], digest=digest("embed", clip.clip_key, times_us))
