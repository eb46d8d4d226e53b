"""Old versions of a Lance table: every commit writes a manifest (200 bytes a fragment) and a transaction, and none of
ours is ever asked for again once its readers have gone. Lance's own clean-up is not used: it goes by when a version was
made, not by when it was replaced, and it removes data files that staged records still name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from videoflow.store.layout import StoredObject

_MANIFEST = re.compile(r"_versions/(\d+)\.manifest")
_TRANSACTION = re.compile(r"_transactions/(\d+)-[0-9a-f-]+\.txn")
#: Lance counts its manifests' names down, so that the newest is listed first.
_LAST = 2**64 - 1


@dataclass(frozen=True)
class TableVersions:
    """The versions of one Lance table, told apart by a moment (``cutoff``).

    Attributes:
        kept: the newest, and those that were replaced at or after the moment: a reader may still hold them; ascending.
        old: the manifests of the others, and the transactions that led to them.
    """

    kept: tuple[int, ...]
    old: tuple[StoredObject, ...]


def table_versions(objects: Iterable[StoredObject], table: str, cutoff: datetime) -> TableVersions:
    """Versions by the objects that lie in a table's folder."""
    made: dict[int, StoredObject] = {}
    transactions: list[tuple[int, StoredObject]] = []
    for o in objects:
        name = o.path.removeprefix(f"{table}/")
        if found := _MANIFEST.fullmatch(name):
            made[_LAST - int(found[1]) if len(found[1]) == 20 else int(found[1])] = o
        elif found := _TRANSACTION.fullmatch(name):
            transactions.append((int(found[1]), o))
    numbers = sorted(made)
    replaced = {a: made[b].modified for a, b in pairwise(numbers)}
    kept = tuple(n for n in numbers if n not in replaced or replaced[n] >= cutoff)
    old = [made[n] for n in numbers if n not in kept and made[n].modified < cutoff]
    # A transaction's name says which version it was made on; the one that led to the oldest kept version stays.
    first = kept[0] if kept else 0
    old += [o for read, o in transactions if read + 1 < first and o.modified < cutoff]
    return TableVersions(kept, tuple(old))
