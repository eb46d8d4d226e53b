"""Newest answers of one stage, column by column: what a plan asks a million items for at once.

A row of Python objects an item would be a kilobyte each; here an item costs its keys' bytes. Questions are asked in
bulk (`find`), answers come as positions in the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DONE, FILTERED, QUARANTINED, RETRY = "done", "filtered", "quarantined", "retry"
NOWHERE = -1
#: Columns of the ledger that make a `LedgerRow`, in its order.
COLUMNS = ["item_key", "video_key", "input_digest", "output_digest", "rows", "state", "class", "message", "at"]
#: Those that a plan asks of every item; the others it asks of a few (`Ledger.states` with ``among``).
LEAN = ["item_key", "output_digest", "rows", "state"]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """An item's newest state, as the plan needs it."""

    item_key: str
    video_key: str
    input_digest: str
    output_digest: str
    rows: int
    state: str
    reason: str | None
    message: str | None
    at: datetime


class States(Mapping[str, LedgerRow]):
    """Answers by item key. ``table``: one row an item, with the columns `COLUMNS`; with only those of `LEAN` there are
    positions and columns to be had, no rows.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def find(self, keys: Sequence[str] | pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Position of every key's row, int32; NOWHERE (-1) where there is none."""
        if not len(self.table):
            return np.full(len(keys), NOWHERE, np.int32)
        if not isinstance(keys, (pa.Array, pa.ChunkedArray)):
            keys = pa.array(keys, pa.string())
        found = pc.fill_null(pc.index_in(keys, value_set=self._keys), NOWHERE)
        return np.asarray(found, np.int32)

    def is_state(self, state: str) -> np.ndarray:
        """By position: whether the row has this state. The last element stands for NOWHERE and is False."""
        return np.append(np.asarray(pc.equal(self.table["state"], state), bool), False)

    def has_rows(self) -> np.ndarray:
        """By position: whether the answer came with rows. The last element stands for NOWHERE and is False."""
        return np.append(np.asarray(pc.greater(self.table["rows"], 0), bool), False)

    def taken(self, positions: np.ndarray, column: str) -> pa.Array:
        """Values of a column at positions; null at NOWHERE."""
        return self._column(column).take(pa.array(positions, mask=positions == NOWHERE))

    def rows(self, positions: Iterable[int]) -> Iterator[LedgerRow]:
        some = self.table.take(pa.array(list(positions), pa.int64()))
        for batch in some.to_batches(max_chunksize=10_000):
            for values in zip(*(batch.column(c).to_pylist() for c in COLUMNS), strict=True):
                yield LedgerRow(*values)

    def without(self, mask: np.ndarray) -> States:
        """These answers less those at the positions where the mask is True."""
        return States(self.table.filter(pa.array(~mask))) if mask.any() else self

    def __getitem__(self, key: str) -> LedgerRow:
        return next(self.rows([self._positions[key]]))

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def __iter__(self) -> Iterator[str]:
        for chunk in self.table["item_key"].chunks:
            yield from chunk.to_pylist()

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def _keys(self) -> pa.Array:
        return self._column("item_key")

    @cached_property
    def _positions(self) -> dict[str, int]:
        """For questions one at a time: a dictionary, made when the first is asked."""
        return {key: i for i, key in enumerate(self)}

    def _column(self, name: str) -> pa.Array:
        return self.table[name].combine_chunks()


def newest(table: pa.Table, by: Sequence[str]) -> pa.Table:
    """The rows with the greatest ``at`` of all that agree in the columns ``by``; of equal ones the last."""
    codes = np.zeros(len(table), np.int64)
    distinct = 1
    for name in by:
        column = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes * len(column.dictionary) + np.asarray(column.indices, np.int64)
        distinct = len(column.dictionary)
    if not len(table) or (len(by) == 1 and distinct == len(table)):
        return table
    order = np.lexsort((np.asarray(table["at"].cast(pa.int64())), codes))  # stable: later rows stay behind earlier ones
    ordered = codes[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    return table.take(pa.array(np.sort(order[last])))
