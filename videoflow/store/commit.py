"""The commit protocol: every unit's rows become part of its table exactly once, whoever dies when.

Worker: write fragments, then put-if-absent ``staging/<stage>/<fp>/<unit>.json`` (first writer wins; the nonce read back
tells whose it is). Committer, any process, no lease: read the table's version, drop units that are in the ledger or in
the properties of the table's later transactions, commit the rest by compare-and-swap (`Merge` of all old fragments and
the new ones at exactly that version), start over on conflict; then append to the ledger; then delete the records.
Plain `Append` never conflicts and would commit twice. Nothing is ever decided by file path.

A full part of a table is closed before the next one begins. Units staged for a closed part are given up: a fragment
cannot move, so the job plans their items anew; workers look up the open part before they write, so it is seldom.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import lance
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata

from videoflow.keys import digest
from videoflow.persist import TRIES, WAIT_SECONDS, insist, is_passing, storage_failure
from videoflow.store import writer
from videoflow.store.layout import Root, part_path, staging_prefix
from videoflow.store.ledger import ItemResult, Ledger
from videoflow.store.tail import LedgerTail
from videoflow.store.writer import Target, is_closed, open_table, read_table, swap_fragments

#: Item keys asked for in one filter.
KEYS_AT_ONCE = 1000
UNITS_PROPERTY = "videoflow.units"


def unit_id(stage: str, fingerprint: str, item_keys: Iterable[str]) -> str:
    """A unit is named by what it holds: its stage, fingerprint and sorted item keys."""
    return digest(stage, fingerprint, sorted(item_keys))


@dataclass(frozen=True)
class UnitRecord:
    """A written, not yet committed unit: its fragments (JSON metadata) and how each of its items ended."""

    unit: str
    target: Target
    items: tuple[ItemResult, ...]
    fragments: tuple[str, ...]
    job: str
    attempt: int = 1
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    software: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{staging_prefix(self.target.stage, self.target.fingerprint)}/{self.unit}.json"

    def to_json(self) -> bytes:
        data = asdict(self)
        data["items"] = [i.to_json() for i in self.items]
        return json.dumps(data).encode()

    @staticmethod
    def from_json(data: dict[str, Any]) -> UnitRecord:
        return UnitRecord(
            **{
                **data,
                "target": Target(**data["target"]),
                "items": tuple(ItemResult.from_json(i) for i in data["items"]),
                "fragments": tuple(data["fragments"]),
            }
        )


def stage_unit(root: Root, record: UnitRecord) -> UnitRecord:
    """Put a unit's record unless one is there; the record that counts is returned (ours, or the first writer's)."""
    root.put_new(record.path, record.to_json())
    there = root.get_json(record.path)
    # Gone already: a committer was faster than this look, and what it committed was the record that was there.
    return UnitRecord.from_json(there) if there else record


class Committer:
    """Commits staged units of one catalog. Any number of them may run at once, in any process."""

    def __init__(self, root: Root, ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._committed: dict[tuple[str, str], set[str]] = {}
        self._tails: dict[tuple[str, str], LedgerTail] = {}
        self._transactions: dict[str, tuple[int, int, dict[str, int]]] = {}  # of a table: first, last read, units
        self._own_version: dict[str, int] = {}  # of a table, right after our own last commit to it

    def recover(self, stage: str, fingerprint: str) -> int:
        """Commit what other processes staged and left behind; how many records there were."""
        records = []
        for path in self._root.paths(staging_prefix(stage, fingerprint)):
            data = self._root.get_json(path)
            if data:
                records.append(UnitRecord.from_json(data))
        self.commit(records)
        return len(records)

    def commit(self, records: Sequence[UnitRecord]) -> None:
        """Make units part of their tables, write the ledger, remove the records.

        Raises:
            SystemFailure: storage failed; whatever was committed is found again by the next committer.
        """
        by_target: dict[str, list[UnitRecord]] = defaultdict(list)
        for record in records:
            by_target[record.target.path].append(record)
        for group in by_target.values():
            fresh, late = self._commit_table(group[0].target, group)
            stage, fingerprint = group[0].target.stage, group[0].target.fingerprint
            if late:  # where the ledger has them too, what it says is of the rows that are in the table
                there = self._ledger.units(stage, fingerprint)
                late = [r for r in late if r.unit not in there]
            entries = [(stage, fingerprint, r.unit, i) for r in fresh + late for i in r.items]
            self._ledger.append(entries, job=group[0].job, attempt=group[0].attempt)
            self._known(stage, fingerprint).update(r.unit for r in fresh + late)
            for record in group:
                self._root.delete(record.path)

    def _commit_table(self, target: Target, records: list[UnitRecord]) -> tuple[list[UnitRecord], list[UnitRecord]]:
        """Compare-and-swap until the table holds all units: (committed now, committed earlier but perhaps not in the
        ledger).
        """
        in_ledger = self._known(target.stage, target.fingerprint)
        wanted = {r.unit: r for r in records if r.unit not in in_ledger}
        late: list[UnitRecord] = []
        failed = 0
        while wanted:
            dataset = open_table(self._root, target.path)
            since = min(r.target.since_version for r in records)
            committed = self._units_in_transactions(dataset, target.path, since)
            for unit, version in committed.items():
                # A commit from before the record was staged is of an earlier unit with the same items (a retry).
                if unit in wanted and version > wanted[unit].target.since_version:
                    late.append(wanted.pop(unit))
            if is_closed(dataset):
                return [], late
            self._drop_doubles(target, wanted, dataset)
            fragments = [FragmentMetadata.from_json(f) for r in wanted.values() for f in r.fragments]
            try:
                if not fragments or self._swap(dataset, fragments, list(wanted), target):
                    break
            except OSError as e:  # carried out or not: the next look at the table's transactions tells
                failed += 1
                if failed == TRIES or not is_passing(e):
                    raise storage_failure(f"cannot commit to {dataset.uri}", e) from e
                time.sleep(WAIT_SECONDS * failed)
        return list(wanted.values()), late

    def _drop_doubles(self, target: Target, wanted: dict[str, UnitRecord], dataset: lance.LanceDataset) -> None:
        """Leave out units any of whose items another unit has brought: the job plans the rest of them anew.

        The ledger is behind the table between another committer's swap and its append, so where the table was changed
        by others, the very version that is about to be swapped is asked, and the closed parts before it.
        """
        if not wanted:
            return
        by = (target.stage, target.fingerprint)
        if by not in self._tails:
            self._tails[by] = LedgerTail(self._root, *by)
        taken = set(self._tails[by].taken())
        if self._own_version.get(target.path) != dataset.version:
            taken |= self._keys_in_table(
                target, dataset, [i.item_key for r in wanted.values() for i in r.items if i.rows]
            )
        for unit, record in list(wanted.items()):
            keys = {i.item_key for i in record.items if i.rows}
            if keys & taken:
                del wanted[unit]
            taken |= keys

    def _keys_in_table(self, target: Target, dataset: lance.LanceDataset, keys: list[str]) -> set[str]:
        """Which of these items have rows in the version at hand, or in earlier parts."""
        found: set[str] = set()
        closed = [part_path(target.table, target.fingerprint, n) for n in range(target.part)]
        for at in range(0, len(keys), KEYS_AT_ONCE):
            some = ", ".join(f"'{k}'" for k in sorted(keys)[at : at + KEYS_AT_ONCE])
            where = f"item_key IN ({some})"
            rows = [read_table(self._root, path, columns=["item_key"], filter=where) for path in closed]
            ask = partial(dataset.to_table, columns=["item_key"], filter=where)
            rows.append(insist(ask, f"cannot read {dataset.uri}"))
            found.update(k for table in rows for k in table["item_key"].to_pylist())
        return found

    def _swap(self, dataset: lance.LanceDataset, new: list[FragmentMetadata], units: list[str], target: Target) -> bool:
        """One attempt; False if somebody else was faster.

        Raises:
            OSError: it may have been carried out all the same.
        """
        try:
            version = swap_fragments(self._root, dataset, new, {UNITS_PROPERTY: json.dumps(units)})
        except CommitConflictError:
            return False
        self._own_version[target.path] = version
        if len(dataset.get_fragments()) + len(new) >= writer.MAX_FRAGMENTS:
            writer.begin_next_part(self._root, target, dataset.schema)
        return True

    def _units_in_transactions(self, dataset: lance.LanceDataset, path: str, since: int) -> dict[str, int]:
        """Units named by the table's transactions after version ``since``, and the newest version that brought each.
        What was read once is kept.
        """
        first, last, found = self._transactions.get(path, (since, since, {}))
        if since < first or dataset.version < last:  # an older record, or another table in the place of the first
            first, last, found = since, since, {}
        if dataset.version > last:
            ask = partial(dataset.get_transactions, dataset.version - last)
            for back, transaction in enumerate(insist(ask, f"cannot read transactions of {dataset.uri}")):
                properties = transaction.transaction_properties if transaction is not None else None
                for unit in json.loads((properties or {}).get(UNITS_PROPERTY, "[]")):
                    found[unit] = max(found.get(unit, 0), dataset.version - back)
            last = dataset.version
        self._transactions[path] = (first, last, found)
        return found

    def _known(self, stage: str, fingerprint: str) -> set[str]:
        key = (stage, fingerprint)
        if key not in self._committed:
            self._committed[key] = self._ledger.units(stage, fingerprint)
        return self._committed[key]
