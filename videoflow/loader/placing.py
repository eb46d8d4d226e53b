"""Where a loader stands among its peers, and where its tensors go: asked of torch, imported here and not before."""

from __future__ import annotations

from typing import Any

from videoflow.errors import LoaderError, MissingExtra, shown


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

    allowed = "allowed are None, 'cpu', 'cuda' or 'cuda:N'"
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as e:
        raise LoaderError(f"device={shown(device)} cannot be used; {allowed}") from e
    if isinstance(device, bool) or found.type not in ("cpu", "cuda"):
        raise LoaderError(f"device={shown(device)} cannot be used; {allowed}")
    if found.type == "cpu":
        return None
    if not torch.cuda.is_available():
        raise LoaderError(f"device={shown(device)} cannot be used: torch sees no CUDA device; leave it out for the CPU")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise LoaderError(f"device={shown(device)} cannot be used: torch sees {torch.cuda.device_count()} CUDA devices")
    return str(found)
