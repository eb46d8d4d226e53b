"""The ledger: what was computed, with what result. Append-only; the newest row of an item wins; plan, resume and
quarantine read only this. Double rows are harmless, `pending` is never written.

A row of state ``retry`` takes an item's answer back: its item reads as never computed, and a unit that holds it may be
committed again. Written by `videoflow quarantine retry`, and by a job that finds a table gone whose rows it counted on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from videoflow.store import schemas
from videoflow.store.layout import LEDGER, Root
from videoflow.store.writer import append_rows, read_table

DONE, FILTERED, QUARANTINED, RETRY = "done", "filtered", "quarantined", "retry"


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


@dataclass(frozen=True)
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


class Ledger:
    """Reads and appends ledger rows of one catalog."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def states(self, stage: str, fingerprint: str) -> dict[str, LedgerRow]:
        """Newest row of every item of one stage and fingerprint, by item key; items to be retried have none."""
        columns = ["item_key", "video_key", "input_digest", "output_digest", "rows", "state", "class", "message", "at"]
        table = self.table(columns, of_stage(stage, fingerprint))
        newest: dict[str, LedgerRow] = {}
        for values in zip(*(table[c].to_pylist() for c in columns), strict=True):
            row = LedgerRow(*values)
            if row.item_key not in newest or newest[row.item_key].at <= row.at:
                newest[row.item_key] = row
        return {k: row for k, row in newest.items() if row.state != RETRY}

    def units(self, stage: str, fingerprint: str) -> set[str]:
        """Units of one stage and fingerprint that are committed, none of whose items is to be retried."""
        table = self.table(["unit"], of_stage(stage, fingerprint))
        return {u for u in table["unit"].to_pylist() if u} - self._reopened(stage, fingerprint)

    def _reopened(self, stage: str, fingerprint: str) -> set[str]:
        """Units with an item that is to be retried: a retry of the same list of items has the same unit id."""
        where = of_stage(stage, fingerprint)
        asked = set(self.table(["item_key"], f"{where} AND state = '{RETRY}'")["item_key"].to_pylist())
        if not asked:
            return set()
        newest: dict[str, tuple[datetime, str]] = {}
        units: dict[str, set[str]] = {}
        for row in self.table(["item_key", "unit", "state", "at"], where).to_pylist():
            key = row["item_key"]
            if key in asked:
                units.setdefault(key, set()).add(row["unit"] or "")
                if key not in newest or newest[key][0] <= row["at"]:
                    newest[key] = (row["at"], row["state"])
        return {u for key, (_, state) in newest.items() if state == RETRY for u in units[key]}

    def table(self, columns: list[str], where: str | None = None) -> pa.Table:
        return read_table(self._root, LEDGER, columns=columns, filter=where)

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


def of_stage(stage: str, fingerprint: str) -> str:
    """Filter for the rows of one stage and fingerprint."""
    return f"stage = '{_quoted(stage)}' AND fingerprint = '{_quoted(fingerprint)}'"


def _quoted(value: str) -> str:
    return value.replace("'", "''")
