"""The order of clips as a pure function of (seed, epoch, global position), in O(1) memory, so that a batch can be named
and rebuilt.

A *cell* holds the clips that may share a batch. Global step g → keyed permutation over all cells' batches → (cell, j) →
keyed permutation inside the cell. There is one cell today, and with one cell the permutation over batches is the
identity: step g takes places g·B … g·B + B − 1 of the epoch's permutation. Further cells leave these values as they
    are: a cell's key depends on its name alone.

The permutations are integer functions of our own, never a library's generator, whose stream may change. Golden values
stand in ``tests/loader/test_loader_order.py``; if one of them changes, old runs can no longer be reproduced.

- From ``FEISTEL_MIN`` items on: a Feistel network of ``ROUNDS`` rounds over ⌈log2 n⌉ bits (the two halves may differ by
  one bit), its values ≥ n sent through it again ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite
  Domains, 2002).
- Below: the items sorted by a keyed 64-bit hash, ties by index. (A Feistel network over so few bits is measurably
biased.)

Both use the finaliser of splitmix64 (Steele, Lea, Flood 2014) and keys from BLAKE3 of (seed, epoch, cell).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from blake3 import blake3

from videoflow.errors import LoaderError

#: Number of this order function; it enters a loader's configuration, and with it its state.
ORDER_FORMAT = 1
FEISTEL_MIN = 65_536
ROUNDS = 8
#: The name of the one cell.
ALL_CLIPS = "all"

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def derive_keys(seed: int, epoch: int, cell: str) -> np.ndarray:
    """Keys of one epoch's permutation of one cell: uint64 (ROUNDS,), from BLAKE3 of their text."""
    text = f"videoflow order {ORDER_FORMAT} seed={int(seed)} epoch={int(epoch)} cell={cell}"
    return np.frombuffer(blake3(text.encode()).digest(length=8 * ROUNDS), dtype="<u8").astype(np.uint64)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, element by element; uint64 in, uint64 out, of the same shape (at least 1-d: it wraps
    without a warning).
    """
    values = (values ^ (values >> _S30)) * _MIX1
    values = (values ^ (values >> _S27)) * _MIX2
    return values ^ (values >> _S31)


def permute(places: np.ndarray, num_items: int, keys: np.ndarray) -> np.ndarray:
    """Items at some places of the keyed permutation of range(num_items).

    Args:
        places: integers in [0, num_items), (n,).
        num_items: size of the permuted range.
        keys: uint64 (ROUNDS,), see ``derive_keys``.

    Returns:
        int64 (n,).

    Raises:
        ValueError: a place outside [0, num_items).
    """
    places = np.atleast_1d(np.asarray(places, dtype=np.int64))
    if places.size and (places.min() < 0 or places.max() >= num_items):
        raise ValueError(f"places must lie in [0, {num_items}), not {places.min()} … {places.max()}")
    if num_items < FEISTEL_MIN:
        return _small_permutation(num_items, keys.tobytes())[places]
    return _walk(places.astype(np.uint64), num_items, keys).astype(np.int64)


@lru_cache(maxsize=8)
def _small_permutation(num_items: int, keys: bytes) -> np.ndarray:
    key = np.frombuffer(keys, dtype=np.uint64)
    index = np.arange(num_items, dtype=np.uint64)
    hashes = mix(mix(index * _GAMMA + key[0]) ^ key[1])
    order = np.argsort(hashes, kind="stable").astype(np.int64)  # stable: ties keep the order of indices
    order.flags.writeable = False
    return order


def _walk(values: np.ndarray, num_items: int, keys: np.ndarray) -> np.ndarray:
    num_bits = (num_items - 1).bit_length()
    values = _feistel(values, num_bits, keys)
    outside = np.flatnonzero(values >= num_items)
    while outside.size:  # fewer than half of the values are outside, so this ends soon
        values[outside] = _feistel(values[outside], num_bits, keys)
        outside = outside[values[outside] >= num_items]
    return values


def _feistel(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 2**num_bits): each round changes one half by a keyed hash of the other, turn by turn."""
    low_bits = np.uint64(num_bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(num_bits - num_bits // 2)) - np.uint64(1)
    low, high = values & low_mask, values >> low_bits
    for i in range(0, ROUNDS, 2):
        high = high ^ (mix(low * _GAMMA + keys[i]) & high_mask)
        low = low ^ (mix(high * _GAMMA + keys[i + 1]) & low_mask)
    return (high << low_bits) | low


@dataclass(frozen=True)
class BatchOrder:
    """One global batch: ``items`` int64 (num_valid,) of the cell, in order; a tail batch holds fewer than
    batch_size.
    """

    cell: str
    items: np.ndarray


@dataclass(frozen=True)
class Order:
    """The order of one loader: which items make up which global batch of which epoch.

    Attributes:
        num_items: items of the cell.
        batch_size: items of a global batch.
        seed: any integer.
        shuffle: True for the keyed permutation, False for the order of items as they are.
        tail: ``"drop"`` leaves out the rest that fills no batch (an epoch's permutation says which), ``"pad"`` keeps it
            as a last, shorter batch.
    """

    num_items: int
    batch_size: int
    seed: int = 0
    shuffle: bool | str = True
    tail: str = "drop"

    def __post_init__(self) -> None:
        if self.shuffle not in (True, False):
            hint = ": reading clumps of neighbours is not there yet" if self.shuffle == "clumps" else ""
            raise LoaderError(f"shuffle={self.shuffle!r} cannot be used{hint}; allowed are True and False")
        if self.batch_size < 1:
            raise LoaderError(f"batch_size={self.batch_size} cannot be used; it must be at least 1")
        if self.tail not in ("drop", "pad"):
            raise LoaderError(f"tail={self.tail!r} cannot be used; allowed are 'drop' and 'pad'")

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_items, self.batch_size)
        return whole + (1 if rest and self.tail == "pad" else 0)

    def batch(self, epoch: int, step: int) -> BatchOrder:
        """The global batch of a step of an epoch.

        Raises:
            IndexError: a step that the epoch does not have.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        cell, number = self._cell_of(step)
        first = number * self.batch_size
        places = np.arange(first, min(first + self.batch_size, self.num_items), dtype=np.int64)
        if not self.shuffle:
            return BatchOrder(cell, places)
        return BatchOrder(cell, permute(places, self.num_items, derive_keys(self.seed, epoch, cell)))

    def _cell_of(self, step: int) -> tuple[str, int]:
        """(cell, number of the batch inside it): the keyed permutation over all cells' batches, with one cell the
        identity.
        """
        return ALL_CLIPS, step
