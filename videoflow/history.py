"""What a stage computed before, under this fingerprint and others: why an item would be computed again.

Beside each artifact table lies ``fingerprint.json``: what its fingerprint was made of. Comparing two of them names the
component that changed: ``stage version``, ``params.fps``, ``identity.decoder``, ``schema``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from videoflow.fingerprint import clip_item_key, components, pass_item_key, video_item_key
from videoflow.recipe import BuiltStage
from videoflow.stage import ClipStage, PassConsumer, SourceStage
from videoflow.store.layout import Root
from videoflow.store.ledger import Ledger, quoted
from videoflow.store.states import DONE, FILTERED, RETRY, newest
from videoflow.unit import RowsItem

PASS, ROWS, CLIP = "pass", "rows", "clip"
#: Rows that become Python objects at once.
ROWS_AT_ONCE = 10_000
#: Named instead of a component: what the item is made from has changed, or nobody wrote down what there was.
INPUT, UNKNOWN = "input", "unknown: computed before fingerprints were explained"


def note_path(table: str, fingerprint: str) -> str:
    return f"{table}/{fingerprint}/fingerprint.json"


def grain_of(built: BuiltStage) -> str:
    """What one item of a stage is: pass (a video, decoded), rows (a video's rows), clip."""
    if isinstance(built.stage, PassConsumer):
        return PASS
    return CLIP if isinstance(built.stage, (ClipStage, SourceStage)) else ROWS


def write_note(root: Root, built: BuiltStage) -> None:
    """Write down what a fingerprint is made of, unless it is there."""
    note = {**components(built.stage), "grain": grain_of(built)}
    root.put_new(note_path(built.table, built.fingerprint), json.dumps(note, indent=1).encode())


def changed_components(old: dict[str, Any] | None, new: dict[str, Any]) -> tuple[str, ...]:
    """Names of the components in which two fingerprints differ."""
    kinds = {"version": int, "params": dict, "identity": dict, "schema": list}
    if old is None or not all(isinstance(old.get(name), kind) for name, kind in kinds.items()):
        return (UNKNOWN,)
    changed = ["stage version"] if old["version"] != new["version"] else []
    for part in ("params", "identity"):
        keys = sorted({*old[part], *new[part]})
        changed += [f"{part}.{k}" for k in keys if old[part].get(k, _ABSENT) != new[part].get(k, _ABSENT)]
    if old["schema"] != new["schema"]:
        changed.append("schema")
    return tuple(changed) or (UNKNOWN,)


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Wanted:
    """An item of a plan, so that its key under another fingerprint or for another input can be told.

    ``detail``: the recipe's stream (pass), the intervals asked for (rows), the clip's key (clip).
    """

    video_key: str
    input_digest: str
    item_key: str
    grain: str
    detail: Any

    @staticmethod
    def of_pass(video_key: str, stream: int | None, item_key: str) -> Wanted:
        return Wanted(video_key, video_key, item_key, PASS, stream)

    @staticmethod
    def of_rows(item: RowsItem) -> Wanted:
        return Wanted(item.video_key, item.input_digest, item.item_key, ROWS, item.intervals)

    @staticmethod
    def of_clip(video_key: str, input_digest: str, item_key: str, clip_key: str) -> Wanted:
        return Wanted(video_key, input_digest, item_key, CLIP, clip_key)

    def key(self, input_digest: str, fingerprint: str) -> str:
        """The item's key if it were made from this input under this fingerprint."""
        if self.grain == PASS:
            return pass_item_key(self.video_key, self.detail, fingerprint)
        if self.grain == ROWS:
            return video_item_key(self.video_key, input_digest, self.detail, fingerprint)
        return clip_item_key(self.detail, input_digest, fingerprint)


@dataclass(frozen=True)
class Past:
    """The newest earlier result for an item: under which fingerprint, when, and what has changed since."""

    fingerprint: str
    at: datetime
    changed: tuple[str, ...]


class StageHistory:
    """Results of one stage under all fingerprints. Made only where something is missing: it reads the ledger."""

    def __init__(self, root: Root, ledger: Ledger, built: BuiltStage, *, video_key: str | None = None) -> None:
        self._root = root
        self._built = built
        self._new = json.loads(json.dumps(components(built.stage)))
        self._changed: dict[str, tuple[str, ...]] = {built.fingerprint: ()}
        where = f"stage = {quoted(built.name)}" + (f" AND video_key = {quoted(video_key)}" if video_key else "")
        columns = ["item_key", "video_key", "fingerprint", "input_digest", "state", "at"]
        table = newest(ledger.table(columns, where), ["item_key"])
        #: What was asked of each video: (fingerprint, input digest). A key tells both, so its newest row does.
        self._asked: dict[str, list[tuple[str, str]]] = {}
        for video, *of in _distinct(table, ["video_key", "fingerprint", "input_digest"]):
            self._asked.setdefault(video, []).append((of[0], of[1]))
        self._retried = table.filter(pc.equal(table["state"], RETRY))["item_key"].combine_chunks()
        done = table.filter(pc.is_in(table["state"], value_set=pa.array([DONE, FILTERED])))
        self._results, self._at = done["item_key"].combine_chunks(), done["at"].combine_chunks()

    def pasts(self, wanted: Sequence[Wanted]) -> list[Past | None]:
        """The newest earlier result of each item; None where there was none."""
        asked = [(n, *pair) for n, w in enumerate(wanted) for pair in self._asked.get(w.video_key, ())]
        keys = pa.array([wanted[n].key(source, fp) for n, fp, source in asked], pa.string())
        found = pc.index_in(keys, value_set=self._results)
        times = self._at.take(found).to_pylist()
        best: dict[int, tuple[datetime, str, str]] = {}
        for (n, fp, source), at in zip(asked, times, strict=True):
            if at is not None:
                best[n] = max(best.get(n, (at, fp, source)), (at, fp, source))
        return [self._past(w, best[n]) if n in best else None for n, w in enumerate(wanted)]

    def _past(self, wanted: Wanted, result: tuple[datetime, str, str]) -> Past:
        at, fp, source = result
        return Past(fp, at, self._components(fp) + ((INPUT,) if source != wanted.input_digest else ()))

    def has_retry(self, items: Iterable[Wanted]) -> bool:
        """Whether one of these items is to be tried again."""
        keys = pa.array([w.item_key for w in items], pa.string())
        return bool(pc.any(pc.is_in(keys, value_set=self._retried)).as_py())

    def _components(self, fingerprint: str) -> tuple[str, ...]:
        if fingerprint not in self._changed:
            old = self._root.peek_json(note_path(self._built.table, fingerprint))
            self._changed[fingerprint] = changed_components(old, self._new)
        return self._changed[fingerprint]


def _distinct(table: pa.Table, columns: list[str]) -> Iterator[list[str]]:
    """The distinct rows of some columns."""
    found = table.select(columns).group_by(columns).aggregate([])
    for batch in found.to_batches(ROWS_AT_ONCE):
        yield from (list(row) for row in zip(*(batch.column(c).to_pylist() for c in columns), strict=True))
