"""Writing fragments: the only way rows get into artifact tables. A fragment written here is not yet part of any table;
`commit` makes it so.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from videoflow.errors import SystemFailure
from videoflow.store.damage import native_line, reading
from videoflow.store.layout import Root, part_number, part_path
from videoflow.store.schemas import DATA_STORAGE_VERSION

#: A table closes at this many fragments and its next part begins: a manifest costs 200 bytes a fragment at every
#: commit.
MAX_FRAGMENTS = 50_000


@dataclass(frozen=True)
class Target:
    """Where a stage's rows go: the open part of its artifact table, and the table version known when this was looked up
    (every commit of a unit staged later has a higher one)."""

    stage: str
    fingerprint: str
    table: str
    part: int
    since_version: int

    @property
    def path(self) -> str:
        return part_path(self.table, self.fingerprint, self.part)


def parts_of(root: Root, table: str, fingerprint: str) -> list[int]:
    """Numbers of the parts a table has, in order."""
    names = root.list_dirs(f"{table}/{fingerprint}")
    return sorted(n for n in map(part_number, names) if n is not None)


def open_table(root: Root, path: str, *, version: int | None = None) -> lance.LanceDataset:
    """A Lance table below the root.

    Raises:
        DamagedCatalog: it cannot be opened.
    """
    with reading(root.url, path):
        return lance.dataset(root.uri(path), version=version, storage_options=root.lance_options())


def create_table(root: Root, path: str, schema: pa.Schema) -> None:
    """Make an empty table unless one is there; two makers at once are fine."""
    try:
        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, []),
            root.uri(path),
            schema=schema,
            mode="create",
            data_storage_version=DATA_STORAGE_VERSION,
            enable_stable_row_ids=True,
            storage_options=root.lance_options(),
        )
    except OSError as e:
        if "already exists" not in str(e).lower():
            raise storage_failure(f"cannot make {root.uri(path)}", e) from e


def ensure_target(root: Root, *, stage: str, fingerprint: str, table: str, schema: pa.Schema) -> Target:
    """The open part of an artifact table, made if there is none; a full one is closed and its next part begun."""
    parts = parts_of(root, table, fingerprint)
    part = parts[-1] if parts else 0
    create_table(root, part_path(table, fingerprint, part), schema)  # a no-op once its first manifest is there
    dataset = open_table(root, part_path(table, fingerprint, part))
    if len(dataset.get_fragments()) >= MAX_FRAGMENTS:
        part += 1
        create_table(root, part_path(table, fingerprint, part), schema)
        dataset = open_table(root, part_path(table, fingerprint, part))
    return Target(stage, fingerprint, table, part, dataset.version)


def write_rows(
    root: Root, target: Target, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, expected: int
) -> list[str]:
    """Write rows as new fragments of a table, streaming; JSON of each fragment's metadata.

    Raises:
        SystemFailure: storage failed, or holds another number of rows than were written.
    """
    if expected == 0:
        return []
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    try:
        fragments = write_fragments(
            reader,
            root.uri(target.path),
            schema=schema,
            mode="append",
            data_storage_version=DATA_STORAGE_VERSION,
            enable_stable_row_ids=True,
            storage_options=root.lance_options(),
        )
    except OSError as e:
        raise storage_failure(f"cannot write to {root.uri(target.path)}", e) from e
    written = sum(f.physical_rows for f in fragments)
    if written != expected:
        raise SystemFailure(f"{root.uri(target.path)}: {written} rows were written instead of {expected}; run again")
    return [json.dumps(f.to_json()) for f in fragments]


def append_rows(root: Root, path: str, table: pa.Table) -> None:
    """Append to one of the tables in which double rows do no harm (ledger, sources). Such appends never conflict."""
    try:
        lance.write_dataset(
            table,
            root.uri(path),
            mode="append",
            data_storage_version=DATA_STORAGE_VERSION,
            enable_stable_row_ids=True,
            storage_options=root.lance_options(),
        )
    except OSError as e:
        raise storage_failure(f"cannot write to {root.uri(path)}", e) from e


def storage_failure(what: str, e: Exception) -> SystemFailure:
    """One line for a storage error; a full disk is called one."""
    text = native_line(e)
    if getattr(e, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
        return SystemFailure(f"{what}: the disk is full; make room and run the same command again")
    return SystemFailure(f"{what}: {text}")
