"""What a stage computed before, under this fingerprint and others: why an item would be computed again.

Beside each artifact table lies ``fingerprint.json``: what its fingerprint was made of. Comparing two of them names the
component that changed: ``stage version``, ``params.fps``, ``identity.decoder``, ``schema``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from videoflow.fingerprint import clip_item_key, components, pass_item_key, video_item_key
from videoflow.recipe import BuiltStage
from videoflow.stage import ClipStage, PassConsumer
from videoflow.store.layout import Root
from videoflow.store.ledger import DONE, FILTERED, RETRY, Ledger
from videoflow.unit import ClipItem, RowsItem

PASS, ROWS, CLIP = "pass", "rows", "clip"
#: Named instead of a component: what the item is made from has changed, or nobody wrote down what there was.
INPUT, UNKNOWN = "input", "unknown: computed before fingerprints were explained"


def note_path(table: str, fingerprint: str) -> str:
    return f"{table}/{fingerprint}/fingerprint.json"


def grain_of(built: BuiltStage) -> str:
    """What one item of a stage is: pass (a video, decoded), rows (a video's rows), clip."""
    if isinstance(built.stage, PassConsumer):
        return PASS
    return CLIP if isinstance(built.stage, ClipStage) else ROWS


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
    def of_clip(item: ClipItem) -> Wanted:
        return Wanted(item.video_key, item.input_digest, item.item_key, CLIP, item.clip.clip_key)

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
        newest: dict[str, tuple[datetime, str]] = {}
        asked: dict[str, set[tuple[str, str]]] = {}
        for key, video, fp, source, state, at in _rows(ledger, columns, where):
            if key not in newest or newest[key][0] <= at:
                newest[key] = (at, state)
                asked.setdefault(video, set()).add((fp, source))
        self._results = {k: at for k, (at, state) in newest.items() if state in (DONE, FILTERED)}
        self._retried = {k for k, (_, state) in newest.items() if state == RETRY}
        self._asked = asked

    def past(self, wanted: Wanted) -> Past | None:
        """The newest earlier result for an item; None if there was none."""
        found = [
            (self._results[key], fp, source)
            for fp, source in self._asked.get(wanted.video_key, ())
            if (key := wanted.key(source, fp)) in self._results
        ]
        if not found:
            return None
        at, fp, source = max(found)
        return Past(fp, at, self._components(fp) + ((INPUT,) if source != wanted.input_digest else ()))

    def has_retry(self, items: Iterable[Wanted]) -> bool:
        """Whether one of these items is to be tried again."""
        return any(w.item_key in self._retried for w in items)

    def _components(self, fingerprint: str) -> tuple[str, ...]:
        if fingerprint not in self._changed:
            old = self._root.peek_json(note_path(self._built.table, fingerprint))
            self._changed[fingerprint] = changed_components(old, self._new)
        return self._changed[fingerprint]


def quoted(text: str) -> str:
    """A string for a filter."""
    return "'" + text.replace("'", "''") + "'"


def _rows(ledger: Ledger, columns: list[str], where: str) -> Any:
    table = ledger.table(columns, where)
    return zip(*(table[c].to_pylist() for c in columns), strict=True)
