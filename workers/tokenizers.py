"""Video tokenizers: the contract that all of them keep, and how one is found by its name.

A tokenizer of your own is ``tokenizer: package.module:factory``; the factory is called with the path in ``weights``
(None without one) and returns an object that keeps `Tokenizer`. One clip is encoded at a time, so what comes of it does
not hang on which clips stand beside it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from videoflow.errors import MissingExtra, RecipeError
from videoflow.find import load_object


@runtime_checkable
class Tokenizer(Protocol):
    """Turns clips into arrays. May also have ``decode(array) -> video``, uint8 (T, H, W, 3) as large as what was
    encoded: PSNR and SSIM of every clip are then among its scores; ``step``, where clips must have step·k frames (+ 1
    if causal) and step is not ``temporal``; and ``digest`` at the factory, a text that enters the fingerprint.

    Attributes:
        temporal, spatial: frames, and pixels of a side, that one position of the grid stands for.
        causal: True if the first frame stands alone, so that clips have 1 + temporal·k frames; else temporal·k.
    """

    temporal: int
    spatial: int
    causal: bool

    def encode(self, video: np.ndarray, *, seed: int) -> np.ndarray:
        """Token ids, integers ([levels,] t, h, w), or latents, float (channels, t, h, w), of one clip.

        Args:
            video: uint8 (T, H, W, 3) RGB; T fits ``temporal``, H and W are multiples of ``spatial``.
            seed: for a random sample: of this clip, the same on every machine and in every batch.
        """
        ...


def usable_frames(tokenizer: Tokenizer, available: int) -> int:
    """The largest number of frames ≤ ``available`` that a tokenizer takes; 0 if there are too few."""
    step = getattr(tokenizer, "step", tokenizer.temporal)
    if tokenizer.causal:
        return available and 1 + (available - 1) // step * step
    return available // step * step


def usable_size(tokenizer: Tokenizer, height: int, width: int) -> tuple[int, int]:
    """The largest sides ≤ height, width that a tokenizer takes."""
    step = tokenizer.spatial
    return height // step * step, width // step * step


def users_tokenizer(path: str, weights: str | None) -> Tokenizer:
    """A tokenizer by dotted path.

    Raises:
        RecipeError: there is no such factory, or what it returns is no tokenizer.
    """
    factory: Callable[[str | None], Any] = load_object(path, what="tokenizer")
    try:
        made = factory(weights)
    except TypeError as e:
        raise RecipeError(f"tokenizer {path!r} cannot be called with the path of its weights: {e}") from e
    if not isinstance(made, Tokenizer):
        lacks = [n for n in ("temporal", "spatial", "causal", "encode") if not hasattr(made, n)]
        raise RecipeError(f"tokenizer {path!r} lacks {', '.join(lacks)} (the contract: workers/tokenizers.py)")
    return made


def need(module: str, *, package: str, needed_for: str, extra: str) -> None:
    """Raises MissingExtra where a package is not installed; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(package, needed_for=needed_for, extra=extra)
