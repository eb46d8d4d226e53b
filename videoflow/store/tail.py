"""The ledger as a committer follows it: read once, and from then on only what was appended since. Reading all of it at
every commit would cost the square of a job's length.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial

from videoflow.persist import insist
from videoflow.store.layout import LEDGER, Root
from videoflow.store.ledger import QUARANTINED, RETRY, of_stage
from videoflow.store.writer import open_table


class LedgerTail:
    """Items of one stage and fingerprint that have an answer which another unit must not bring again."""

    def __init__(self, root: Root, stage: str, fingerprint: str) -> None:
        self._root = root
        self._where = of_stage(stage, fingerprint)
        self._fragments: set[int] = set()
        self._newest: dict[str, datetime] = {}
        self._taken: set[str] = set()

    def taken(self) -> set[str]:
        """Keys of items that are done or filtered, by the newest rows; quarantined ones may be tried again."""
        dataset = open_table(self._root, LEDGER)
        new = [f for f in dataset.get_fragments() if f.fragment_id not in self._fragments]
        if new:
            columns = ["item_key", "state", "at"]
            scan = partial(dataset.scanner, columns=columns, filter=self._where, fragments=new)
            rows = insist(lambda: scan().to_table(), f"cannot read {dataset.uri}")
            for key, state, at in zip(*(rows[c].to_pylist() for c in columns), strict=True):
                if key not in self._newest or self._newest[key] <= at:
                    self._newest[key] = at
                    (self._taken.discard if state in (QUARANTINED, RETRY) else self._taken.add)(key)
            self._fragments.update(f.fragment_id for f in new)
        return self._taken
