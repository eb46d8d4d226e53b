"""What a version says of payloads: where each clip's lies, and what a reader must know to take frames of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from videoflow.store import schemas
from videoflow.store.layout import Root
from videoflow.store.reader import PART, ROW_ID, rows_of

_COLUMNS = ("width", "height", "fps_num", "fps_den", "first_grid", "grid_count", "n", "codec", "gop", "digest")


def payloads_of(root: Root, parts: Sequence[str], item_keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Values of `schemas.PAYLOAD_REF` of some items, by item key."""
    table = rows_of(root, parts, item_keys, columns=(*_COLUMNS, "offsets"), with_row_ids=True)
    found = {}
    for row in table.to_pylist():
        offsets, gop = row["offsets"], row["gop"]
        starts = [*offsets[:-1:gop], offsets[-1]]
        place = {"part": row[PART], "row_id": row[ROW_ID], "offset": 0, "length": offsets[-1], "gop_offsets": starts}
        found[row["item_key"]] = {**place, **{name: row[name] for name in _COLUMNS}}
    return found


def with_payloads(table: pa.Table, payloads: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """A version's rows with the column ``payload``; null for clips that have none."""
    values = [payloads.get(key) for key in table["clip_key"].to_pylist()]
    return table.append_column(schemas.VERSION_PAYLOAD, pa.array(values, schemas.PAYLOAD_REF))
