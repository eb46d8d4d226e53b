"""Video VAEs of diffusers, from a local folder: its config.json names the class, its weights are safetensors (or a
torch file of plain tensors; nothing in either is run).

Latents are stored as the encoder gives them: a trainer still applies the scale and shift that the VAE's config names.
``moments`` are mean and log-variance along the channels, so that a trainer can draw anew each epoch; ``sample`` is one
draw, seeded by the clip; ``mode`` is the mean. Imports torch and diffusers: import it late.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videoflow.errors import MissingWeights, RecipeError, first_line
from workers.tokenizers import need
from workers.torch_video import array_of, best_device, from_model, to_model
from workers.vae_folder import CONFIG, class_name


class DiffusersVAE:
    """A tokenizer (see workers/tokenizers.py) around a video VAE.

    Args:
        folder: with config.json and weights. latents: moments | sample | mode.
        tiling, slicing: work on parts of a picture, or of a batch, at a time: less memory, and with tiling slightly
            other numbers.
    """

    causal = True

    def __init__(self, folder: Path, *, latents: str, dtype: str, tiling: bool, slicing: bool) -> None:
        need("diffusers", package="diffusers", needed_for="tokenize with tokenizer: diffusers", extra="diffusers")
        import diffusers

        name = class_name(folder)
        cls: Any = getattr(diffusers, name, None)
        if cls is None or not hasattr(cls, "encode"):
            raise RecipeError(f"{folder / CONFIG}: this diffusers ({diffusers.__version__}) has no VAE {name}")
        self._latents = latents
        self._device, self._dtype = best_device(), getattr(torch, dtype)
        safe = any(folder.glob("*.safetensors"))
        try:
            options = {"use_safetensors": safe, "torch_dtype": self._dtype, "low_cpu_mem_usage": _has_accelerate()}
            vae = cls.from_pretrained(folder, local_files_only=True, **options)
        except (OSError, ValueError, RuntimeError, TypeError, KeyError) as e:
            raise MissingWeights(f"no {name} can be loaded from {folder}: {first_line(e)}") from e
        self._vae = vae.to(self._device).eval().requires_grad_(False)
        self.temporal, self.spatial = _compression(self._vae, name)
        #: CogVideoX works on groups of eight frames, and decodes other counts to too many.
        self.step = max(self.temporal, getattr(self._vae, "num_sample_frames_batch_size", None) or 1)
        self._switch("tiling", tiling)
        self._switch("slicing", slicing)

    def _switch(self, what: str, on: bool) -> None:
        if on and not hasattr(self._vae, f"enable_{what}"):
            raise RecipeError(f"{type(self._vae).__name__} has no {what}; leave out {what}: true")
        if on:
            getattr(self._vae, f"enable_{what}")()

    def encode(self, video: np.ndarray, *, seed: int) -> np.ndarray:
        """Latents float32 (channels, t, h, w); twice the channels for moments."""
        with torch.inference_mode():
            found = self._vae.encode(to_model(video, device=self._device, dtype=self._dtype)).latent_dist
            if self._latents == "moments":
                made = found.parameters
            elif self._latents == "sample":
                made = found.sample(torch.Generator().manual_seed(seed))
            else:
                made = found.mode()
        return array_of(made)

    def decode(self, array: np.ndarray) -> np.ndarray:
        """uint8 (T, H, W, 3); of moments their mean."""
        mean = array[: len(array) // 2] if self._latents == "moments" else array
        codes = torch.from_numpy(np.ascontiguousarray(mean)).to(self._device, self._dtype).unsqueeze(0)
        with torch.inference_mode():
            return from_model(self._vae.decode(codes).sample)


def _has_accelerate() -> bool:
    """What loads large models piece by piece; without it diffusers warns that it cannot."""
    return importlib.util.find_spec("accelerate") is not None


def _compression(vae: Any, name: str) -> tuple[int, int]:
    """(frames, pixels of a side) that one position of the grid stands for, as the VAE's attributes or its config say;
    diffusers has several spellings.
    """
    config = dict(vae.config)
    temporal = _first(vae, config, ("temporal_compression_ratio", "scale_factor_temporal"))
    spatial = _first(vae, config, ("spatial_compression_ratio", "scale_factor_spatial"))
    if spatial is None and config.get("block_out_channels"):
        spatial = 2 ** (len(config["block_out_channels"]) - 1)  # a halving between blocks
    if temporal is None or spatial is None:
        raise RecipeError(
            f"{name} does not say how much it compresses time and space, so it is no video VAE that is known here; "
            "wrap it in a class of your own (the contract: workers/tokenizers.py)"
        )
    return int(temporal), int(spatial)


def _first(vae: Any, config: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        value = config.get(name) or getattr(vae, name, None)
        if value is not None:
            return value
    return None
