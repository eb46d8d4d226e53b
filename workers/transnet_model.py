"""The network of TransNetV2 (T. Souček, J. Lokoč, 2020) under the parameter names of its published PyTorch weights.

Three cells of dilated (2+1)D convolutions, plus two looks at the neighbourhood of every frame: how alike the features
are, and how alike the colour histograms. Imports torch: only workers/transnet.py imports it, late.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FILTERS = 16
DILATIONS = (1, 2, 4, 8)
LOOKUP = 101
FEATURES = 128
BINS = 512


def neighbourhood(features: Tensor) -> Tensor:
    """Dot products of every frame with the 50 before it, itself and the 50 after; 0 outside.

    (B, T, D) → (B, T, 101).
    """
    alike = torch.bmm(features, features.transpose(1, 2))
    side = LOOKUP // 2
    num_frames = alike.shape[1]
    padded = functional.pad(alike, (side, side))
    rows = torch.arange(num_frames, device=alike.device)[:, None]
    columns = rows + torch.arange(LOOKUP, device=alike.device)[None]
    return padded[:, rows, columns]


class SeparableConv(nn.Module):
    """A 3×3 convolution in space, then one over 3 frames that lie ``dilation`` apart."""

    def __init__(self, channels: int, filters: int, dilation: int) -> None:
        super().__init__()
        space = nn.Conv3d(channels, 2 * filters, (1, 3, 3), padding=(0, 1, 1), bias=False)
        time = nn.Conv3d(
            2 * filters, filters, (3, 1, 1), dilation=(dilation, 1, 1), padding=(dilation, 0, 0), bias=False
        )
        self.layers = nn.ModuleList([space, time])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class DilatedBlock(nn.Module):
    """Four dilations side by side, joined and normalised: (B, C, T, H, W) → (B, 4·filters, T, H, W)."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        for dilation in DILATIONS:
            self.add_module(f"Conv3D_{dilation}", SeparableConv(channels, filters, dilation))
        self.bn = nn.BatchNorm3d(filters * len(DILATIONS), eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.get_submodule(f"Conv3D_{dilation}")(x) for dilation in DILATIONS]
        normal: Tensor = self.bn(torch.cat(parts, dim=1))
        return normal


class Cell(nn.Module):
    """Two dilated blocks with a shortcut, then half the size in space."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        width = filters * len(DILATIONS)
        self.DDCNN = nn.ModuleList([DilatedBlock(channels, filters), DilatedBlock(width, filters)])

    def forward(self, x: Tensor) -> Tensor:
        shortcut = functional.relu(self.DDCNN[0](x))
        x = functional.relu(self.DDCNN[1](shortcut)) + shortcut
        return functional.avg_pool3d(x, (1, 2, 2))


class FrameSimilarity(nn.Module):
    """How alike the pooled features of neighbouring frames are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.projection = nn.Linear(channels, FEATURES)
        self.fc = nn.Linear(LOOKUP, FEATURES)

    def forward(self, cells: list[Tensor]) -> Tensor:
        pooled = torch.cat([x.mean(dim=(3, 4)) for x in cells], dim=1).transpose(1, 2)
        return functional.relu(self.fc(neighbourhood(functional.normalize(self.projection(pooled), dim=2))))


class ColorHistograms(nn.Module):
    """How alike the colours of neighbouring frames are, by histograms of 8 × 8 × 8 bins."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(LOOKUP, FEATURES)

    def forward(self, frames: Tensor) -> Tensor:
        top = (frames >> 5).long().flatten(2, 3)
        bins = (top[..., 0] << 6) + (top[..., 1] << 3) + top[..., 2]
        counts = torch.zeros(*bins.shape[:2], BINS, device=frames.device)
        counts.scatter_add_(2, bins, torch.ones_like(bins, dtype=counts.dtype))
        return functional.relu(self.fc(neighbourhood(functional.normalize(counts, dim=2))))


class TransNetV2(nn.Module):
    """uint8 (B, T, 27, 48, 3) RGB → logits (B, T, 1): the frame is the last one of a shot or of a transition."""

    def __init__(self) -> None:
        super().__init__()
        widths = [FILTERS * 2**i for i in range(3)]
        inputs = [3, *(len(DILATIONS) * w for w in widths[:2])]
        self.SDDCNN = nn.ModuleList([Cell(c, w) for c, w in zip(inputs, widths, strict=True)])
        self.frame_sim_layer = FrameSimilarity(len(DILATIONS) * sum(widths))
        self.color_hist_layer = ColorHistograms()
        # 27 × 48 halved three times is 3 × 6; the two neighbourhoods stand beside it.
        self.fc1 = nn.Linear(len(DILATIONS) * widths[2] * 3 * 6 + 2 * FEATURES, 1024)
        self.cls_layer1 = nn.Linear(1024, 1)
        self.cls_layer2 = nn.Linear(1024, 1)  # all frames of a transition; in the weights, not used here

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.permute(0, 4, 1, 2, 3).float() / 255.0
        cells: list[Tensor] = []
        for cell in self.SDDCNN:
            x = cell(x)
            cells.append(x)
        x = x.permute(0, 2, 3, 4, 1).flatten(2)
        x = torch.cat([self.color_hist_layer(frames), self.frame_sim_layer(cells), x], dim=2)
        logits: Tensor = self.cls_layer1(functional.relu(self.fc1(x)))
        return logits
