"""Where a loader stands among its peers, and where its tensors go: asked of torch, imported here and not before."""

from __future__ import annotations

from typing import Any

from videoflow.errors import LoaderError, MissingExtra


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else from torch.distributed if it is initialised, else (0, 1).

    Raises:
        LoaderError: only one of the two is given.
        MissingExtra: torch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError as e:
        raise MissingExtra("torch", needed_for="the loader", extra="torch") from e
    running = dist.is_available() and dist.is_initialized()
    if (rank is None) != (world_size is None):
        raise LoaderError(f"rank={rank} and world_size={world_size}: give both or none of them")
    if rank is not None and world_size is not None:
        return rank, world_size
    return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)


def check_device(device: Any) -> str | None:
    """A torch device's name, None for the CPU. Raises LoaderError for one that is not there."""
    import torch

    try:
        kind = None if device is None else torch.device(device).type
    except RuntimeError as e:
        raise LoaderError(f"device={device!r} cannot be used; allowed are None, 'cpu', 'cuda' or 'cuda:N'") from e
    if kind == "cuda" and not torch.cuda.is_available():
        raise LoaderError(f"device={device!r} cannot be used: torch sees no CUDA device; leave it out for the CPU")
    return None if kind in (None, "cpu") else str(device)
