"""Rows of Lance tables below the root, read in one place; of artifact tables by item key, for planning, for stages that
read rows, and for publishing versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import lance
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.store.damage import damaged, read, reading
from videoflow.store.layout import Root
from videoflow.store.writer import open_table

T = TypeVar("T")
#: Up to this many keys are pushed down as a filter; beyond it the table is scanned and filtered here.
MAX_PUSHED_KEYS = 2000
PART, ROW_ID = "_part", "_rowid"


def read_rows(
    root: Root,
    path: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    *,
    with_row_ids: bool = False,
    dataset: lance.LanceDataset | None = None,
) -> pa.Table:
    """Rows of a table (``dataset``, if it is open already), checked to be what Arrow says they are.

    Raises:
        DamagedCatalog: they cannot be read.
    """

    def ask() -> pa.Table:
        table = (dataset or open_table(root, path, once=True)).to_table(
            columns=None if columns is None else list(columns), filter=where, with_row_id=with_row_ids
        )
        table.validate(full=True)  # text that is no UTF-8, lists that point beyond their end
        return table

    return read(root.url, path, ask)


def read_batches(
    root: Root, path: str, columns: Sequence[str], where: str | None, keep: Callable[[pa.RecordBatch], T]
) -> list[T]:
    """What ``keep`` makes of a table's rows, some at a time, so that they need not all be held at once. It may be
    called again from the beginning, where the way to the table fails.

    Raises:
        DamagedCatalog: they cannot be read.
    """

    def ask() -> list[T]:
        found = []
        scanner = open_table(root, path, once=True).scanner(columns=list(columns), filter=where, batch_readahead=2)
        for batch in scanner.to_batches():
            batch.validate(full=True)
            found.append(keep(batch))
        return found

    return read(root.url, path, ask)


def rows_of(
    root: Root,
    parts: Sequence[str],
    keys: Collection[str] | pa.Array,
    *,
    columns: Sequence[str] | None = None,
    with_row_ids: bool = False,
    where: str | None = None,
) -> pa.Table:
    """Rows whose ``item_key`` is one of ``keys``, from all parts of a table (paths below the root).

    Blob columns are left out. ``where``: a filter besides. ``with_row_ids`` adds ``_rowid`` (stable row id) and
    ``_part`` (position in ``parts``).

    Raises:
        DamagedCatalog: a part cannot be read.
    """
    tables = [pa.table({"item_key": pa.array([], pa.string())})] if not parts else []
    for number, path in enumerate(parts):
        dataset = open_table(root, path, once=True)
        lost = [c for c in columns or () if c not in dataset.schema.names]
        if lost:
            raise damaged(root.url, path, f"its schema lacks {', '.join(lost)}")
        light = [f.name for f in dataset.schema if not isinstance(f.type, pa.ExtensionType)]
        wanted = light if columns is None else [c for c in columns if c in light]
        named = list(dict.fromkeys(["item_key", *wanted]))
        table = read_rows(root, path, named, _filter(keys, where), with_row_ids=with_row_ids, dataset=dataset)
        if len(keys) > MAX_PUSHED_KEYS:
            asked = pc.is_in(table["item_key"], value_set=_array(keys))
            table = table if pc.all(asked).as_py() else table.filter(asked)
        if with_row_ids:
            table = table.append_column(PART, pa.array([number] * len(table), pa.int32()))
        tables.append(table)
    with reading(root.url, parts[0] if parts else ""):
        return pa.concat_tables(tables, promote_options="default")


def _filter(keys: Collection[str] | pa.Array, where: str | None) -> str | None:
    if not len(keys):
        return "false"
    if len(keys) > MAX_PUSHED_KEYS:
        return where
    among = f"item_key IN ({', '.join(repr(k) for k in sorted(_array(keys).to_pylist()))})"
    return f"{among} AND {where}" if where else among


def _array(keys: Collection[str] | pa.Array) -> pa.Array:
    return keys if isinstance(keys, pa.Array) else pa.array(list(keys), pa.string())
