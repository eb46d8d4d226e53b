"""Memory for batches, used again once nobody holds the batch that lay in it.

A batch of 90 MB of fresh memory costs 22,000 page faults, about a tenth of its decoding. A block goes back to the pool
when the flat array over it is collected, and that lives as long as any view or tensor of it: numpy makes it the base of
all of them, because its own memory belongs to something that is no array.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np

#: Free blocks that are kept; more are given back to the system.
MAX_FREE = 4


class BufferPool:
    """Hands out uninitialised uint8 arrays. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lock = threading.RLock()  # a collection, and with it _give_back, may begin while this thread holds it

    def __repr__(self) -> str:
        return f"BufferPool({len(self._free)} free blocks)"

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of a shape, its contents undefined."""
        num_bytes = math.prod(shape)
        block = self._reuse(num_bytes) or bytearray(num_bytes)
        flat = np.frombuffer(block, dtype=np.uint8, count=num_bytes)
        weakref.finalize(flat, self._give_back, block).atexit = False
        return flat.reshape(shape)

    def clear(self) -> None:
        """Give free blocks back to the system."""
        with self._lock:
            self._free.clear()

    def _reuse(self, num_bytes: int) -> bytearray | None:
        """A free block that is large enough, but not more than twice as large."""
        with self._lock:
            for i, block in enumerate(self._free):
                if num_bytes <= len(block) <= 2 * num_bytes:
                    return self._free.pop(i)
        return None

    def _give_back(self, block: bytearray) -> None:
        with self._lock:
            if len(self._free) < MAX_FREE:
                self._free.append(block)
