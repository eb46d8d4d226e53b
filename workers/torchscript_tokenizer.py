"""TorchScript tokenizers in the file layout of the Cosmos tokenizer: a folder with encoder.jit and, if there is one,
decoder.jit.

The encoder takes (1, 3, T, H, W) in −1 … 1 and gives the latents or the token ids, or a tuple that begins with them;
the decoder takes these back. Both are causal in time: T = 1 + temporal·k frames become 1 + k. Source: NVIDIA, Cosmos
tokenizer (https://github.com/NVIDIA/Cosmos-Tokenizer), README and ``video_lib.py``. A TorchScript file is a program: it
is run only where the recipe says ``allow_torchscript: true``. Imports torch: import it late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from videoflow.errors import MediaError, MissingWeights, first_line
from workers.torch_video import array_of, best_device, from_model, to_model

ENCODER, DECODER = "encoder.jit", "decoder.jit"


class TorchScriptTokenizer:
    """A tokenizer (see workers/tokenizers.py)."""

    causal = True

    def __init__(self, folder: Path, *, temporal: int, spatial: int, dtype: str) -> None:
        self.temporal, self.spatial = temporal, spatial
        self._device = best_device()
        self._dtype = getattr(torch, dtype)
        self._encoder = self._load(folder / ENCODER)
        self._decoder = self._load(folder / DECODER) if (folder / DECODER).is_file() else None

    @property
    def has_decoder(self) -> bool:
        return self._decoder is not None

    def encode(self, video: np.ndarray, *, seed: int) -> np.ndarray:
        """Ids int32 (t, h, w), or latents float32 (channels, t, h, w).

        Raises:
            MediaError: the encoder gives another grid than ``temporal`` and ``spatial`` say.
        """
        with torch.inference_mode():
            made: Any = self._encoder(to_model(video, device=self._device, dtype=self._dtype))
        array = array_of(made[0] if isinstance(made, (tuple, list)) else made)
        frames, height, width = video.shape[:3]
        grid = (1 + (frames - 1) // self.temporal, height // self.spatial, width // self.spatial)
        if array.ndim not in (3, 4) or array.shape[-3:] != grid:
            raise MediaError(
                "model_error",
                f"{ENCODER} makes {array.shape} of {frames} frames of {height}×{width}; with temporal: {self.temporal} "
                f"and spatial: {self.spatial} the grid would be {grid}: set them to what the encoder was made for",
            )
        return array

    def decode(self, array: np.ndarray) -> np.ndarray:
        """uint8 (T, H, W, 3)."""
        assert self._decoder is not None
        codes = torch.from_numpy(array).to(self._device).unsqueeze(0)
        with torch.inference_mode():
            made: Any = self._decoder(codes.to(self._dtype) if codes.is_floating_point() else codes)
        return from_model(made[0] if isinstance(made, (tuple, list)) else made)

    def _load(self, path: Path) -> Any:
        try:
            return torch.jit.load(str(path), map_location=self._device).eval().to(dtype=self._dtype)
        except (RuntimeError, OSError, ValueError) as e:
            raise MissingWeights(f"{path} cannot be loaded as TorchScript: {first_line(e)}") from e
