"""Writing fragments: the only way rows get into artifact tables. A fragment written here is not yet part of any table;
`commit` makes it so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lance
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, write_fragments

from videoflow.errors import SystemFailure
from videoflow.persist import insist
from videoflow.store.damage import read
from videoflow.store.layout import Root, part_number, part_path
from videoflow.store.schemas import DATA_STORAGE_VERSION

#: A table closes at this many fragments and its next part begins: a manifest costs 200 bytes a fragment at every
#: commit.
MAX_FRAGMENTS = 50_000
#: Key in a Lance table's config that says a part is closed.
CLOSED = "videoflow.closed"
_SMALL_CACHE = 1 << 20


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
    """Numbers of the parts a table has, in order. One whose maker was killed before its first manifest is none yet."""
    names = root.list_dirs(f"{table}/{fingerprint}")
    numbers = sorted(n for n in map(part_number, names) if n is not None)
    return [n for n in numbers if root.has_any(f"{part_path(table, fingerprint, n)}/_versions", ".manifest")]


def open_table(root: Root, path: str, *, version: int | None = None, once: bool = False) -> lance.LanceDataset:
    """A Lance table below the root. ``once``: it is read through once, so that Lance need not keep what it learns of
    every file: a hundred megabytes of a ledger of some thousand units.

    Raises:
        DamagedCatalog: it cannot be opened.
    """
    uri = root.uri(path)
    cache, options = _SMALL_CACHE if once else None, root.lance_options()

    def open_it() -> lance.LanceDataset:
        return lance.dataset(
            uri,
            version=version,
            storage_options=options,
            metadata_cache_size_bytes=cache,
            index_cache_size_bytes=cache,
        )

    return read(root.url, path, open_it)


def _write(root: Root, path: str, data: Any, *, mode: str, schema: pa.Schema | None = None) -> None:
    lance.write_dataset(
        data,
        root.uri(path),
        schema=schema,
        mode=mode,
        data_storage_version=DATA_STORAGE_VERSION,
        enable_stable_row_ids=True,
        storage_options=root.lance_options(),
    )


def create_table(root: Root, path: str, schema: pa.Schema) -> None:
    """Make an empty table unless one is there; two makers at once are fine."""

    def make() -> None:
        try:
            _write(root, path, pa.RecordBatchReader.from_batches(schema, []), mode="create", schema=schema)
        except OSError as e:
            if "already exists" not in str(e).lower():
                raise

    insist(make, f"cannot make {root.uri(path)}")


def write_new_table(root: Root, path: str, table: pa.Table) -> None:
    """Write a whole table at a path that nobody else writes to.

    Raises:
        SystemFailure: storage failed, or holds other rows than were written.
    """

    def make() -> None:
        try:
            _write(root, path, table, mode="create")
        except OSError as e:  # where the answer to an earlier try got lost, it is there
            if "already exists" not in str(e).lower():
                raise

    insist(make, f"cannot write {root.uri(path)}")
    written = insist(open_table(root, path).count_rows, f"cannot read {root.uri(path)}")
    if written != len(table):
        raise SystemFailure(f"{root.uri(path)}: {written} rows were written instead of {len(table)}; run again")


def ensure_target(root: Root, *, stage: str, fingerprint: str, table: str, schema: pa.Schema) -> Target:
    """The open part of an artifact table, made if there is none; a full one is closed and its next part begun."""
    parts = parts_of(root, table, fingerprint)
    target = Target(stage, fingerprint, table, parts[-1] if parts else 0, 0)
    create_table(root, target.path, schema)  # a no-op once its first manifest is there
    dataset = open_table(root, target.path)
    if is_closed(dataset) or len(dataset.get_fragments()) >= MAX_FRAGMENTS:
        return begin_next_part(root, target, schema)
    return replace(target, since_version=dataset.version)


def open_target(root: Root, target: Target) -> Target:
    """Where rows go now: the same part, or the newest of those that were begun since the target was looked up."""
    parts = parts_of(root, target.table, target.fingerprint)
    if not parts or parts[-1] <= target.part:
        return target
    newest = replace(target, part=parts[-1])
    return replace(newest, since_version=open_table(root, newest.path).version)


def begin_next_part(root: Root, target: Target, schema: pa.Schema) -> Target:
    """Close a part for good and make the next one. Any number of processes may do so at once, or die in between.

    No row may come into both parts, so the old one is closed before the new one begins: every commit of units reads
    the mark and swaps the very version that it read. The mark itself does not conflict with a commit that has not seen
    it; the swap of nothing that follows does.
    """
    while not insist(partial(_close, root, target.path), f"cannot close {root.uri(target.path)}"):
        pass
    following = replace(target, part=target.part + 1)
    create_table(root, following.path, schema)
    return replace(following, since_version=open_table(root, following.path).version)


def _close(root: Root, path: str) -> bool:
    """One step of closing a part; True when it is closed and every later swap has seen so."""
    dataset = open_table(root, path)
    if not is_closed(dataset):
        try:
            dataset.update_config({CLOSED: "1"})
        except (OSError, ValueError):  # another one's mark at the same moment is as good as ours
            if not is_closed(open_table(root, path)):
                raise
        return False
    return _swap_nothing(root, dataset)


def _swap_nothing(root: Root, dataset: lance.LanceDataset) -> bool:
    try:
        swap_fragments(root, dataset, [], {})
    except CommitConflictError:
        return False
    return True


def is_closed(dataset: lance.LanceDataset) -> bool:
    """Whether a part takes no more units, as of this version of it."""
    return bool(dataset.config().get(CLOSED) == "1")


def swap_fragments(
    root: Root, dataset: lance.LanceDataset, new: Sequence[FragmentMetadata], properties: dict[str, str]
) -> lance.LanceDataset:
    """Add fragments to exactly this version of a table (compare-and-swap); what this made. See store/swap.py.

    Raises:
        CommitConflictError: there is a newer one. OSError: it may have been carried out all the same.
    """
    transaction = lance.Transaction(
        read_version=dataset.version, operation=_addition(dataset, list(new)), transaction_properties=properties
    )
    return lance.LanceDataset.commit(
        dataset,
        transaction,
        max_retries=0,
        storage_options=root.lance_options(),
        enable_stable_row_ids=True,
    )


def _addition(dataset: lance.LanceDataset, new: list[FragmentMetadata]) -> lance.LanceOperation.BaseOperation:
    anchor = dataset.get_fragment(0)
    if anchor is None:  # compacted away: the oldest that is left, so that all who read this version take the same
        anchor = min(dataset.get_fragments(), key=lambda f: f.fragment_id, default=None)
    if anchor is None:
        return lance.LanceOperation.Merge(new, dataset.lance_schema)  # of nothing: it conflicts with everything
    return lance.LanceOperation.Update(updated_fragments=[anchor.metadata], new_fragments=new)


def write_rows(
    root: Root, target: Target, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]], *, expected: int
) -> list[str]:
    """Write rows as new fragments of a table, streaming; JSON of each fragment's metadata.

    Args:
        batches: gives the rows, from their beginning each time it is called.

    Raises:
        SystemFailure: storage failed, or holds another number of rows than were written.
    """
    if expected == 0:
        return []

    def write() -> list[FragmentMetadata]:
        written: list[FragmentMetadata] = write_fragments(
            pa.RecordBatchReader.from_batches(schema, batches()),
            root.uri(target.path),
            schema=schema,
            mode="append",
            data_storage_version=DATA_STORAGE_VERSION,
            enable_stable_row_ids=True,
            storage_options=root.lance_options(),
        )
        return written

    fragments = insist(write, f"cannot write to {root.uri(target.path)}")
    written = sum(f.physical_rows for f in fragments)
    if written != expected:
        raise SystemFailure(f"{root.uri(target.path)}: {written} rows were written instead of {expected}; run again")
    return [json.dumps(f.to_json()) for f in fragments]


def append_rows(root: Root, path: str, table: pa.Table) -> None:
    """Append to one of the tables in which double rows do no harm (ledger, sources). Such appends never conflict."""
    insist(lambda: _write(root, path, table, mode="append"), f"cannot write to {root.uri(path)}")
