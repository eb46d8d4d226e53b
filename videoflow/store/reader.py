"""Rows of artifact tables by item key, for planning, for stages that read rows, and for publishing versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from videoflow.store.layout import Root
from videoflow.store.writer import open_table, read_table

#: Up to this many keys are pushed down as a filter; beyond it the table is scanned and filtered here.
MAX_PUSHED_KEYS = 2000
PART, ROW_ID = "_part", "_rowid"


def rows_of(
    root: Root,
    parts: Sequence[str],
    keys: Collection[str],
    *,
    columns: Sequence[str] | None = None,
    with_row_ids: bool = False,
) -> pa.Table:
    """Rows whose ``item_key`` is one of ``keys``, from all parts of a table (paths below the root).

    Blob columns are left out. ``with_row_ids`` adds ``_rowid`` (stable row id) and ``_part`` (position in ``parts``).
    """
    tables = []
    for number, path in enumerate(parts):
        light = [f.name for f in open_table(root, path).schema if not isinstance(f.type, pa.ExtensionType)]
        wanted = light if columns is None else [c for c in columns if c in light]
        pushed = len(keys) <= MAX_PUSHED_KEYS
        where = (
            f"item_key IN ({', '.join(repr(k) for k in sorted(keys))})"
            if pushed and keys
            else ("false" if not keys else None)
        )
        asked = list(dict.fromkeys(["item_key", *wanted]))
        table = read_table(root, path, columns=asked, filter=where, with_row_id=with_row_ids)
        if not pushed:
            table = table.filter(pc.is_in(table["item_key"], value_set=pa.array(list(keys))))
        if with_row_ids:
            table = table.append_column(PART, pa.array([number] * len(table), pa.int32()))
        tables.append(table)
    return pa.concat_tables(tables, promote_options="default")
