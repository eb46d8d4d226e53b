"""H11 (lance#7955, lance#8069): compaction beside null and empty values loses nothing, in the storage version in use, for
blob columns and for plain large_binary ones. pylance 14.0.2 holds it; an upgrade that does not is found here.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from videoflow.store.schemas import DATA_STORAGE_VERSION

#: Keys 0 … 5. The large form lies in a sidecar file of its own instead of in the data file.
VALUES = [b"a" * 100, None, b"", b"b" * 200, None, b"c" * 50]
DELETED = 1
LARGE = os.urandom(5 << 20)


def make(path: str, kind: str, values: list[bytes | None], rows_a_fragment: int) -> None:
    column = lance.blob_field("data") if kind == "blob" else pa.field("data", pa.large_binary())
    schema = pa.schema([pa.field("key", pa.int64()), column])
    for at in range(0, len(values), rows_a_fragment):
        some = values[at : at + rows_a_fragment]
        data = lance.blob_array(some) if kind == "blob" else pa.array(some, pa.large_binary())
        table = pa.Table.from_arrays([pa.array(range(at, at + len(some)), pa.int64()), data], schema=schema)
        lance.write_dataset(
            table,
            path,
            mode="append" if at else "create",
            data_storage_version=DATA_STORAGE_VERSION,
            enable_stable_row_ids=True,
        )


def by_scan(dataset: lance.LanceDataset) -> dict[int, bytes | None]:
    table = dataset.scanner(columns=["key", "data"], blob_handling="all_binary").to_table()
    return dict(zip(table["key"].to_pylist(), table["data"].to_pylist(), strict=True))


def ids_of(dataset: lance.LanceDataset) -> dict[int, int]:
    table = dataset.to_table(columns=["key"], with_row_id=True)
    return dict(zip(table["key"].to_pylist(), table["_rowid"].to_pylist(), strict=True))


def by_take(dataset: lance.LanceDataset, kind: str) -> dict[int, Any]:
    """By stable row id, as the product reads: one row at a time, so that an answer cannot slip to its neighbour."""
    found: dict[int, Any] = {}
    for key, row_id in ids_of(dataset).items():
        if kind == "blob":
            (blob,) = dataset.take_blobs("data", ids=[row_id])
            found[key] = None if blob is None else blob.read()
        else:
            found[key] = dataset._take_rows([row_id], columns=["data"])["data"][0].as_py()
    return found


def by_range(dataset: lance.LanceDataset, values: list[bytes | None]) -> dict[int, bytes | None]:
    """All in one call, as the loader reads."""
    ids = ids_of(dataset)
    asked = [(row_id, 0, len(values[key] or b"")) for key, row_id in ids.items()]
    found: dict[int, bytes | None] = dict.fromkeys(ids)
    for request, _, data in dataset.read_blob_ranges("data", asked, selector="ids"):
        found[list(ids)[request]] = None if data is None else bytes(data)
    return found


@pytest.mark.parametrize("rows_a_fragment", [3, 2, 1])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("kind", ["blob", "plain"])
def test_h11_compaction_keeps_null_empty_and_their_neighbours(
    tmp_path: Path, kind: str, size: str, rows_a_fragment: int
) -> None:
    values = [LARGE if size == "large" and v and len(v) == 200 else v for v in VALUES]
    path = str(tmp_path / "t.lance")
    make(path, kind, values, rows_a_fragment)
    ids = ids_of(lance.dataset(path))
    dataset = lance.dataset(path)
    dataset.delete(f"key = {DELETED}")
    wanted = {key: v for key, v in enumerate(values) if key != DELETED}

    def check() -> None:
        current = lance.dataset(path)
        assert by_scan(current) == wanted
        assert by_take(current, kind) == wanted
        if kind == "blob":
            assert by_range(current, values) == wanted
        assert ids_of(current) == {key: i for key, i in ids.items() if key != DELETED}  # references hold

    check()
    metrics = lance.dataset(path).optimize.compact_files(materialize_deletions_threshold=0.0)
    assert metrics.fragments_removed > 0
    check()
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert len(lance.dataset(path).versions()) == 1
    check()
