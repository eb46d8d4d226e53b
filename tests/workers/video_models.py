"""Small video tokenizers for tests: real TorchScript files and real VAEs of diffusers, made and saved here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Unfold(nn.Module):
    """Continuous, causal, lossless: a block of 8 frames × 8 × 8 pixels becomes 1,536 channels. The first frame is
    repeated 7 times before it, as a causal tokenizer pads.
    """

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = torch.cat([x[:, :, :1].expand(-1, -1, 7, -1, -1), x], dim=2) * self.gain
        b, c, t, h, w = x.shape
        x = x.reshape(b, c, t // 8, 8, h // 8, 8, w // 8, 8).permute(0, 1, 3, 5, 7, 2, 4, 6)
        return (x.reshape(b, c * 512, t // 8, h // 8, w // 8),)


class Fold(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        b, c, t, h, w = z.shape
        x = z.reshape(b, c // 512, 8, 8, 8, t, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return x.reshape(b, c // 512, t * 8, h * 8, w * 8)[:, :, 7:]


class Luma(nn.Module):
    """Discrete, causal: the mean of a block, as a number from 0 to 255. Gives (indices, codes) as Cosmos' DV does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([x[:, :, :1].expand(-1, -1, 7, -1, -1), x], dim=2)
        mean = torch.nn.functional.avg_pool3d(x.mean(dim=1, keepdim=True), 8)[:, 0]
        return ((mean + 1.0) * 127.5).round().to(torch.int32), mean


class Flat(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        x = ids.to(torch.float32) / 127.5 - 1.0
        x = x.repeat_interleave(8, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
        return x[:, 7:].unsqueeze(1).expand(-1, 3, -1, -1, -1)


def save_jit(folder: Path, encoder: nn.Module, decoder: nn.Module | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(encoder).save(str(folder / "encoder.jit"))
    if decoder is not None:
        torch.jit.script(decoder).save(str(folder / "decoder.jit"))
    return folder


#: Class, configuration, compression of time and of a side.
VAES: dict[str, tuple[dict[str, Any], int, int]] = {
    "AutoencoderKLWan": (
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "latents_mean": [0.0] * 4,
         "latents_std": [1.0] * 4, "temperal_downsample": [False, True, True]}, 4, 8),
    "AutoencoderKLCogVideoX": (
        {"down_block_types": ["CogVideoXDownBlock3D"] * 4, "up_block_types": ["CogVideoXUpBlock3D"] * 4,
         "block_out_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
         "temporal_compression_ratio": 4}, 4, 8),
    "AutoencoderKLHunyuanVideo": (
        {"latent_channels": 4, "block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 4}, 4, 8),
    "AutoencoderKLLTXVideo": (
        {"latent_channels": 8, "block_out_channels": [8, 8, 8, 8], "decoder_block_out_channels": [8, 8, 8, 8],
         "layers_per_block": [1, 1, 1, 1, 1], "decoder_layers_per_block": [1, 1, 1, 1, 1]}, 8, 32),
}  # fmt: skip


def save_vae(folder: Path, name: str, *, seed: int = 0) -> Path:
    import diffusers

    torch.manual_seed(seed)
    vae = getattr(diffusers, name)(**VAES[name][0])
    vae.save_pretrained(folder)
    return folder


def moving(frames: int, height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Smooth blobs that drift, uint8 (frames, height, width, 3)."""
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(x / 17 + t / 5 + p) + np.cos(y / 11 - t / 7 + p) for p in phase]
    return np.stack([(127 + 60 * w).round() for w in waves], axis=-1).astype(np.uint8)
