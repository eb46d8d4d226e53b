"""The decode engine's contract, and the choice between engines.

Engines get frames whose CRC was checked, and give identical pixels: at cached size and for crops to the bit, after a
resize within mean 0.5 and at most 12 of 255 (the CPU rounds between two steps, a GPU does not).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from videoflow.errors import LoaderError
from videoflow.loader.reader import EncodedClip

ENGINES = ("auto", "cpu", "dali")


class DecodeEngine(Protocol):
    """Decodes batches of clips, one call at a time; made in one thread, it may be used in another."""

    name: str

    def decode(self, clips: Sequence[EncodedClip], *, size: tuple[int, int] | None, fit: str) -> Any:
        """Pictures of clips that have T frames each.

        Args:
            clips: (B,), all with the same T; with ``size=None`` also all with the same height and width.
            size: (H, W) of the result, None for the cached size.
            fit: how pictures of another shape go into it, see ``videoflow.loader.fit``.

        Returns:
            uint8 (B, T, H, W, 3), RGB: a numpy array or a torch tensor that nobody else writes to.

        Raises:
            BadSample: a frame does not decode; its clip is named.
        """

    def close(self) -> None:
        """Called once, after the last batch."""


def make_engine(name: str, *, device: str | None = None, threads: int = 2) -> DecodeEngine:
    """An engine by name; ``"auto"`` takes DALI for a GPU where it is installed, else plain threads.

    On a CPU the two are about as fast; plain threads need no package and survive any bytes.

    Args:
        device: where pictures are wanted: None or "cpu", or a CUDA device like "cuda" or "cuda:1".
        threads: decoding threads on the CPU.

    Raises:
        LoaderError: no such engine.
        MissingExtra: ``"dali"`` was asked for and is not installed.
    """
    if name not in ENGINES:
        raise LoaderError(f"engine={name!r} cannot be used; allowed are {', '.join(repr(e) for e in ENGINES)}")
    if threads < 1:
        raise LoaderError(f"threads={threads} cannot be used; it must be at least 1")
    on_gpu = device is not None and device.startswith("cuda")
    if name == "dali" or (name == "auto" and on_gpu and importlib.util.find_spec("nvidia.dali") is not None):
        from videoflow.loader.engine_dali import DaliEngine

        return DaliEngine(device=device if on_gpu else None, threads=threads)
    from videoflow.loader.engine_cpu import CpuEngine

    return CpuEngine(threads=threads)


def check_clips(clips: Sequence[EncodedClip], size: tuple[int, int] | None) -> None:
    """Raises LoaderError if clips cannot share one array."""
    counts = {len(c.payloads) for c in clips}
    if len(counts) != 1:
        raise LoaderError(f"clips of one batch must have the same number of frames, not {sorted(counts)}")
    if size is None:
        refuse_mixed_sizes({(c.height, c.width) for c in clips})


def refuse_mixed_sizes(sizes: set[tuple[int, int]]) -> None:
    """Raises LoaderError, naming the sizes (height, width) and the remedies, if there is more than one."""
    if len(sizes) > 1:
        names = ", ".join(f"{h}×{w}" for h, w in sorted(sizes)[:5]) + (", …" if len(sizes) > 5 else "")
        raise LoaderError(
            f"size=None needs clips of one size in a batch, but there are {len(sizes)} sizes (height×width): "
            f"{names}; give size= "
            "(and fit=), or filter= to one size, like filter='height = 256 AND width = 456', or batch_size=1"
        )
