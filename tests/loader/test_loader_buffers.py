"""Memory is used again only when nobody can see it any more."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from videoflow.loader.buffers import MAX_FREE, BufferPool


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_dropped_array_is_used_again() -> None:
    pool = BufferPool()
    first = pool.take((4, 1000))
    at = address(first)
    del first
    assert address(pool.take((3, 1000))) == at


def test_views_keep_the_memory() -> None:
    pool = BufferPool()
    first = pool.take((4, 1000))
    view = first[1:].reshape(-1)[5:10]
    view[:] = 7
    del first
    gc.collect()
    other = pool.take((4, 1000))
    other[:] = 9
    assert (view == 7).all()


def test_tensors_keep_the_memory() -> None:
    torch = pytest.importorskip("torch")
    pool = BufferPool()
    tensor = torch.from_numpy(pool.take((4, 1000))).reshape(2, 2, 1000).permute(1, 0, 2)[0, 1]
    tensor[:] = 7
    gc.collect()
    pool.take((4, 1000))[:] = 9
    assert (tensor == 7).all()


def test_sizes_that_fit_badly_are_not_used() -> None:
    pool = BufferPool()
    pool.take((1000,))
    assert repr(pool) == "BufferPool(1 free blocks)"
    small, large = pool.take((400,)), pool.take((1001,))
    assert repr(pool) == "BufferPool(1 free blocks)"
    del small, large


def test_free_blocks_are_bounded() -> None:
    pool = BufferPool()
    arrays = [pool.take((100,)) for _ in range(MAX_FREE + 3)]
    arrays.clear()
    assert repr(pool) == f"BufferPool({MAX_FREE} free blocks)"
    pool.clear()
    assert repr(pool) == "BufferPool(0 free blocks)"
