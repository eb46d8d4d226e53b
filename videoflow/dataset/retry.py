"""Trying quarantined items again: their answers are taken back in the ledger, and the next run finds them missing."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from videoflow.dataset.catalog import Catalog
from videoflow.errors import QUARANTINE_CLASSES, QueryError
from videoflow.store.commit import Committer
from videoflow.store.ledger import QUARANTINED

#: Sources that could not be read are no items: every run looks at them again.
_TRIED_ANYWAY = "sources"


@dataclass(frozen=True)
class Retried:
    """What `retry_quarantined` did: ``items`` taken back (results of stages), of how many ``videos``; ``unreadable``
    sources match too, but are tried by every run.
    """

    items: int
    videos: int
    unreadable: int


def retry_quarantined(catalog: Catalog, *, classes: Collection[str] = (), uri: str | None = None) -> Retried:
    """Let the next run try quarantined items again: all of them, those of some classes, those of one source.

    Raises:
        QueryError: an unknown class or source.
    """
    for name in classes:
        if name not in QUARANTINE_CLASSES:
            raise QueryError(f"unknown quarantine class {name!r}, allowed: {', '.join(QUARANTINE_CLASSES)}")
    video = _video_of(catalog, uri) if uri else None
    ledger = catalog.ledger
    pairs = ledger.table(["stage", "fingerprint"], f"state = '{QUARANTINED}'").to_pylist()
    committer = Committer(catalog.root, ledger)
    items, videos, unreadable = 0, set(), 0
    for stage, fingerprint in sorted({(r["stage"], r["fingerprint"]) for r in pairs}):
        if stage != _TRIED_ANYWAY:
            committer.recover(stage, fingerprint)  # a record that waits must not put the old answer back afterwards
        states = ledger.states(stage, fingerprint)
        bad = [
            r
            for r in states.rows(np.flatnonzero(states.is_state(QUARANTINED)[:-1]))
            if (not classes or r.reason in classes) and (not video or r.video_key == video)
        ]
        if stage == _TRIED_ANYWAY:
            current = {s.video_key for s in catalog.known_sources().values()}
            unreadable += sum(r.video_key in current for r in bad)
            continue
        ledger.reopen(stage, fingerprint, bad, why="to be tried again, as asked", job="")
        items += len(bad)
        videos |= {r.video_key for r in bad}
    return Retried(items, len(videos), unreadable)


def _video_of(catalog: Catalog, uri: str) -> str:
    known = catalog.known_sources()
    row = known.get(uri) or known.get(os.path.abspath(uri))
    if row is None:
        raise QueryError(f"no source {uri!r} in {catalog.root.url}; `videoflow quarantine list` names the bad ones")
    return row.video_key
