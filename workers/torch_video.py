"""What the model-based tokenizers share: pixels to a model's numbers and back, devices, dtypes. Imports torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def best_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def to_model(video: np.ndarray, *, device: str, dtype: torch.dtype) -> Tensor:
    """uint8 (T, H, W, 3) to (1, 3, T, H, W) in −1 … 1, the range of Cosmos' and diffusers' video models."""
    pixels = torch.from_numpy(np.ascontiguousarray(video)).to(device).permute(3, 0, 1, 2)
    return (pixels.to(torch.float32) / 127.5 - 1.0).to(dtype).unsqueeze(0)


def from_model(made: Tensor) -> np.ndarray:
    """(1, 3, T, H, W) in −1 … 1 to uint8 (T, H, W, 3), rounded."""
    pixels = ((made[0].float() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(1, 2, 3, 0).cpu().numpy())


def array_of(made: Tensor) -> np.ndarray:
    """A model's answer for one clip, without the batch axis: integers as int32, numbers as float32."""
    first = made[0].detach().cpu()
    return np.asarray(first.float().numpy() if first.is_floating_point() else first.to(torch.int32).numpy())
