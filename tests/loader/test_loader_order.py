"""The order is a pure function, covers everything once, and its values never change."""

from __future__ import annotations

import numpy as np
import pytest

from videoflow.errors import LoaderError
from videoflow.loader.order import FEISTEL_MIN, Order, derive_keys, permute

# These values must never change: runs that were made with them could not be reproduced any more. A change needs a new
# ORDER_FORMAT, the old one kept beside it.
GOLDEN = {
    "small, epoch 0": (Order(10, 10), (0, 0), [4, 7, 8, 1, 3, 2, 9, 0, 6, 5]),
    "small, epoch 1": (Order(10, 10), (1, 0), [8, 3, 6, 9, 2, 5, 4, 7, 1, 0]),
    "small, seed 7": (Order(10, 10, seed=7), (0, 0), [5, 7, 4, 3, 8, 9, 0, 1, 6, 2]),
    "largest small": (Order(65_535, 6, seed=3), (2, 100), [63620, 20688, 20084, 45477, 42865, 16962]),
    "smallest Feistel": (Order(65_536, 6, seed=3), (2, 100), [43853, 12616, 6685, 37282, 40900, 60396]),
    "odd bits": (Order(100_003, 6), (0, 0), [16373, 26154, 32291, 89510, 46699, 79588]),
    "ten million": (
        Order(10_000_000, 6, seed=42),
        (5, 1000000),
        [9470854, 8413667, 3938937, 7929210, 1793525, 6124867],
    ),
    "negative seed": (Order(1_000_000, 4, seed=-1), (0, 3), [275385, 512205, 999125, 339618]),
}


@pytest.mark.parametrize(("order", "at", "items"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_values(order: Order, at: tuple[int, int], items: list[int]) -> None:
    assert order.batch(*at).items.tolist() == items


@pytest.mark.parametrize("num_items", [1, 2, 3, 1000, FEISTEL_MIN - 1, FEISTEL_MIN, FEISTEL_MIN + 1, 131_072, 200_003])
def test_every_item_exactly_once(num_items: int) -> None:
    items = permute(np.arange(num_items), num_items, derive_keys(1, 2, "all"))
    assert np.array_equal(np.sort(items), np.arange(num_items))


def test_a_window_is_a_part_of_the_whole() -> None:
    keys = derive_keys(5, 0, "all")
    whole = permute(np.arange(70_000), 70_000, keys)
    assert np.array_equal(permute(np.array([69_999, 5, 5]), 70_000, keys), whole[[69_999, 5, 5]])


@pytest.mark.parametrize("num_items", [1000, 70_000])
def test_epochs_seeds_and_cells_differ_and_look_random(num_items: int) -> None:
    orders = [
        permute(np.arange(num_items), num_items, derive_keys(*k))
        for k in [(0, 0, "all"), (0, 1, "all"), (1, 0, "all"), (0, 0, "b")]
    ]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(num_items))[0, 1]) < 5 / np.sqrt(num_items)
        for b in orders[:i]:
            assert np.count_nonzero(a == b) < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(num_items)


@pytest.mark.parametrize("num_items", [1000, FEISTEL_MIN])
def test_first_item_is_spread_evenly_over_epochs(num_items: int) -> None:
    firsts = [int(permute(np.array([0]), num_items, derive_keys(0, e, "all"))[0]) for e in range(2000)]
    counts = np.histogram(firsts, bins=10, range=(0, num_items))[0]
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 40  # chi², 9 degrees of freedom: 40 is p ≈ 1e-5, and the values are fixed


def test_without_shuffling_items_stay_in_order() -> None:
    order = Order(7, 3, shuffle=False, tail="pad")
    assert [order.batch(4, s).items.tolist() for s in range(order.steps_per_epoch)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_steps_and_tails() -> None:
    assert Order(7, 3, tail="drop").steps_per_epoch == 2
    assert Order(7, 3, tail="pad").steps_per_epoch == 3
    assert Order(6, 3, tail="pad").steps_per_epoch == 2
    assert Order(2, 3, tail="drop").steps_per_epoch == 0
    with pytest.raises(IndexError):
        Order(7, 3).batch(0, 2)


def test_the_tail_does_not_change_the_order_before_it() -> None:
    drop, pad = Order(23, 4, seed=9), Order(23, 4, seed=9, tail="pad")
    assert all(np.array_equal(drop.batch(1, s).items, pad.batch(1, s).items) for s in range(5))


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(LoaderError, match=r"clumps.*not there yet"):
        Order(7, 3, shuffle="clumps")
    with pytest.raises(LoaderError, match=r"tail='keep'"):
        Order(7, 3, tail="keep")
    with pytest.raises(LoaderError, match=r"batch_size=0"):
        Order(7, 0)
    with pytest.raises(ValueError, match=r"places"):
        permute(np.array([7]), 7, derive_keys(0, 0, "all"))
