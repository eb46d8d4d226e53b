"""The ledger: what was computed, with what result. Append-only; the newest row of an item wins; plan, resume and
quarantine read only this. Double rows are harmless, `pending` is never written.

A row of state ``retry`` takes an item's answer back: its item reads as never computed, and a unit that holds it may be
committed again. Written by `videoflow quarantine retry`, and by a job that finds a table gone whose rows it counted on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from lance.commit import CommitConflictError

from videoflow.persist import storage_failure
from videoflow.store import schemas
from videoflow.store.layout import LEDGER, Root
from videoflow.store.reader import read_batches, read_rows
from videoflow.store.states import COLUMNS, DONE, FILTERED, LEAN, NOWHERE, QUARANTINED, RETRY, LedgerRow, States, newest
from videoflow.store.writer import append_rows, open_table

__all__ = [
    "DONE",
    "FILTERED",
    "QUARANTINED",
    "RETRY",
    "ItemResult",
    "Ledger",
    "LedgerRow",
    "States",
    "quoted",
]
#: Item keys asked for in one filter; beyond it the rows are read and looked through here.
KEYS_AT_ONCE = 1000
#: Beyond this many fragments a job makes few of them before it reads.
MAX_LEDGER_FRAGMENTS = 1000


@dataclass(frozen=True)
class ItemResult:
    """How one item of a stage ended.

    ``damage``: half-open pts intervals. ``reason``: quarantine class or why it was filtered. ``rows``: 0 is an answer.
    """

    item_key: str
    video_key: str
    input_digest: str
    output_digest: str = ""
    rows: int = 0
    state: str = DONE
    reason: str | None = None
    message: str | None = None
    damage: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ItemResult:
        return ItemResult(**{**data, "damage": tuple((a, b) for a, b in data["damage"])})


class Ledger:
    """Reads and appends ledger rows of one catalog."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def states(self, stage: str, fingerprint: str, *, among: Collection[str] | None = None) -> States:
        """Newest row of every item of one stage and fingerprint; items to be retried have none. ``among``: only these
        items are asked for.
        """
        where = _of(stage, fingerprint)
        if among is not None and len(among) <= KEYS_AT_ONCE:
            where += f" AND item_key IN ({', '.join(map(quoted, sorted(among)))})" if among else " AND false"
        states = States(newest(self.table(COLUMNS, where), ["item_key"]))
        if among is not None and len(among) > KEYS_AT_ONCE:
            found = states.find(sorted(among))
            states = States(states.table.take(pa.array(found[found != NOWHERE])))
        return states.without(states.is_state(RETRY)[:-1])

    def lean_states(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], States]:
        """The answers of several stages, by (stage, fingerprint), with the columns `LEAN`: all in one reading, since
        the ledger of many units is many files.
        """

        def keep(batch: pa.RecordBatch) -> dict[tuple[str, str], pa.RecordBatch]:
            stages, fingerprints = (pc.unique(batch[name]).to_pylist() for name in ("stage", "fingerprint"))
            lean = batch.select([*LEAN, "at"])
            lean = lean.set_column(LEAN.index("state"), "state", lean["state"].dictionary_encode())
            if (len(stages), len(fingerprints)) == (1, 1):  # as a unit's rows are
                return {(stages[0], fingerprints[0]): lean}
            of = {(s, f): pc.and_(pc.equal(batch["stage"], s), pc.equal(batch["fingerprint"], f)) for s, f in wanted}
            return {pair: lean.filter(mine) for pair, mine in of.items()}

        where = " OR ".join(f"({_of(*pair)})" for pair in wanted)
        kept = read_batches(self._root, LEDGER, ["stage", "fingerprint", *LEAN, "at"], where, keep) if wanted else []
        states = {}
        for pair in wanted:
            batches = [k.pop(pair) for k in kept if pair in k]
            states[pair] = _lean(batches)
        return states

    def units(self, stage: str, fingerprint: str) -> set[str]:
        """Units of one stage and fingerprint that are committed, none of whose items is to be retried."""
        table = self.table(["unit"], _of(stage, fingerprint))
        return {u for u in table["unit"].unique().to_pylist() if u} - self._reopened(stage, fingerprint)

    def _reopened(self, stage: str, fingerprint: str) -> set[str]:
        """Units with an item that is to be retried: a retry of the same list of items has the same unit id."""
        where = _of(stage, fingerprint)
        asked = self.table(["item_key"], f"{where} AND state = '{RETRY}'")["item_key"].unique()
        if not len(asked):
            return set()
        table = self.table(["item_key", "unit", "state", "at"], where)
        table = table.filter(pc.is_in(table["item_key"], value_set=asked))
        last = newest(table, ["item_key"])
        again = last.filter(pc.equal(last["state"], RETRY))["item_key"]
        units = table.filter(pc.is_in(table["item_key"], value_set=again.combine_chunks()))["unit"]
        return {u or "" for u in units.unique().to_pylist()}

    def table(self, columns: list[str], where: str | None = None) -> pa.Table:
        return read_rows(self._root, LEDGER, columns, where)

    def tidy(self) -> None:
        """Make few fragments of many: every commit of a unit appends one, and a reader opens each. Appends go on
        meanwhile; rows keep their order. Of two who tidy at once, one does it.
        """
        dataset = open_table(self._root, LEDGER)
        if len(dataset.get_fragments()) <= MAX_LEDGER_FRAGMENTS:
            return
        try:
            dataset.optimize.compact_files()
        except CommitConflictError:
            return
        except OSError as e:
            raise storage_failure(f"cannot compact {dataset.uri}", e) from e

    def reopen(self, stage: str, fingerprint: str, rows: Iterable[LedgerRow], *, why: str, job: str) -> None:
        """Take answers back: the next plan finds these items missing. ``why`` is kept as the message."""
        answers = (
            ItemResult(r.item_key, r.video_key, r.input_digest, state=RETRY, reason=r.reason, message=why) for r in rows
        )
        self.append(((stage, fingerprint, "", a) for a in answers), job=job)

    def append(self, entries: Iterable[tuple[str, str, str, ItemResult]], *, job: str, attempt: int = 1) -> None:
        """Add rows for (stage, fingerprint, unit, result) entries."""
        now = datetime.now(UTC)
        rows = [
            {
                "stage": stage,
                "fingerprint": fp,
                "item_key": r.item_key,
                "video_key": r.video_key,
                "input_digest": r.input_digest,
                "output_digest": r.output_digest,
                "rows": r.rows,
                "state": r.state,
                "class": r.reason,
                "message": r.message,
                "damage": [{"t0_pts": a, "t1_pts": b} for a, b in r.damage],
                "unit": unit,
                "job": job,
                "attempt": attempt,
                "at": now,
            }
            for stage, fp, unit, r in entries
        ]
        if rows:
            append_rows(self._root, LEDGER, pa.Table.from_pylist(rows, schema=schemas.LEDGER))


def quoted(text: str) -> str:
    """A string for a filter."""
    return "'" + text.replace("'", "''") + "'"


def _lean(batches: list[pa.RecordBatch]) -> States:
    """The newest answers among rows of one stage, those to be retried left out."""
    if not batches:
        return States(pa.schema([schemas.LEDGER.field(n) for n in LEAN]).empty_table())
    table = newest(pa.Table.from_batches(batches).unify_dictionaries(), ["item_key"]).select(LEAN)
    states = States(table.combine_chunks())
    return states.without(states.is_state(RETRY)[:-1])


def _of(stage: str, fingerprint: str) -> str:
    return f"stage = {quoted(stage)} AND fingerprint = {quoted(fingerprint)}"
