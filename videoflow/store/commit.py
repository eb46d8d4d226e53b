"""The commit protocol: every unit's rows become part of its table exactly once, whoever dies when.

Worker: write fragments, then put-if-absent ``staging/<stage>/<fp>/<unit>.json`` (first writer wins; the nonce read back
tells whose it is). Committer, any process, no lease: read the table's version, drop units that are in the ledger or in
the properties of the table's later transactions, commit the rest by compare-and-swap (store/swap.py) at exactly that
version, start over on conflict; then append to the ledger; then delete the records. Plain `Append` never conflicts and
would commit twice. Nothing is ever decided by file path.

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
from typing import Any

import lance
from lance.fragment import FragmentMetadata

from videoflow.errors import DamagedCatalog
from videoflow.keys import digest
from videoflow.persist import TRIES, WAIT_SECONDS, is_passing, storage_failure
from videoflow.store import writer
from videoflow.store.damage import parsed
from videoflow.store.layout import Root, staging_prefix
from videoflow.store.ledger import QUARANTINED, ItemResult, Ledger
from videoflow.store.swap import TableHead
from videoflow.store.writer import Target, is_closed


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
    return _parsed(root, record.path, there) if there else record


def _parsed(root: Root, path: str, data: dict[str, Any]) -> UnitRecord:
    return parsed(root.url, path, lambda: UnitRecord.from_json(data))


class Committer:
    """Commits staged units of one catalog. Any number of them may run at once, in any process."""

    def __init__(self, root: Root, ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._committed: dict[tuple[str, str], set[str]] = {}
        self._heads: dict[str, TableHead] = {}

    def _records(self, stage: str, fingerprint: str) -> list[str]:
        """Paths of the staged records; a local one that is being written has a number behind its name."""
        return [p for p in self._root.paths(staging_prefix(stage, fingerprint)) if p.endswith(".json")]

    def recover(self, stage: str, fingerprint: str) -> int:
        """Commit what other processes staged and left behind; how many records there were."""
        records = []
        for path in self._records(stage, fingerprint):
            try:
                data = self._root.get_json(path)
                records += [_parsed(self._root, path, data)] if data is not None else []
            except DamagedCatalog:  # nobody can commit it: its unit is computed again
                self._root.delete(path)
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
        head = self._heads.setdefault(target.path, TableHead(self._root, target.path))
        failed = 0
        while wanted:
            dataset = head.dataset
            committed = head.units_since(min(r.target.since_version for r in records))
            for unit, record in list(wanted.items()):
                # A commit from before the record was staged is of an earlier unit with the same items (a retry).
                if committed.get(unit, 0) > record.target.since_version:
                    late.append(wanted.pop(unit))
            if is_closed(dataset):
                return [], late
            self._drop_doubles(target, wanted, head)
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

    def _drop_doubles(self, target: Target, wanted: dict[str, UnitRecord], head: TableHead) -> None:
        """Leave out units any of whose items another unit has brought: the job plans the rest of them anew."""
        taken = self._taken(target, wanted, head) if wanted and not head.is_own else set()
        for unit, record in list(wanted.items()):
            keys = _with_rows(record)
            if keys & taken:
                del wanted[unit]
            taken |= keys

    def _taken(self, target: Target, wanted: dict[str, UnitRecord], head: TableHead) -> set[str]:
        """Items of these units that others have brought up to the version of the table that is about to be swapped.

        What another committer has swapped is in the ledger, or its record is still staged: records go only after the
        ledger has them. So the order is version, records, ledger; the table's rows need not be read.
        """
        mine = {key for record in wanted.values() for key in _with_rows(record)}
        taken: set[str] = set()
        for path in self._records(target.stage, target.fingerprint):
            if path.rsplit("/", 1)[-1].removesuffix(".json") in wanted:
                continue
            data = self._root.get_json(path)
            record = UnitRecord.from_json(data) if data else None  # gone: the ledger has it by now
            if record is None or not mine & _with_rows(record):
                continue
            its = head if record.target.path == target.path else TableHead(self._root, record.target.path)
            since = record.target.since_version
            if its.units_since(since).get(record.unit, 0) > since:
                taken |= _with_rows(record)
        states = self._ledger.states(target.stage, target.fingerprint, among=mine)
        return taken | set(states.without(states.is_state(QUARANTINED)[:-1]))

    def _swap(self, dataset: lance.LanceDataset, new: list[FragmentMetadata], units: list[str], target: Target) -> bool:
        """One attempt; False if somebody else was faster.

        Raises:
            OSError: it may have been carried out all the same.
        """
        head = self._heads[target.path]
        assert dataset.version == head.dataset.version
        if not head.swap(new, units):
            return False
        if head.num_fragments >= writer.MAX_FRAGMENTS:
            writer.begin_next_part(self._root, target, head.dataset.schema)
        return True

    def _known(self, stage: str, fingerprint: str) -> set[str]:
        key = (stage, fingerprint)
        if key not in self._committed:
            self._committed[key] = self._ledger.units(stage, fingerprint)
        return self._committed[key]


def _with_rows(record: UnitRecord) -> set[str]:
    return {i.item_key for i in record.items if i.rows}
