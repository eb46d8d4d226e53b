"""Why one item is what it is: the ledger's newest answer at every stage, and what a recipe would do about it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from videoflow.dataset.catalog import Catalog
from videoflow.errors import QueryError
from videoflow.fingerprint import clip_item_key
from videoflow.history import CLIP, PASS, ROWS, StageHistory, Wanted, grain_of, note_path
from videoflow.identify import stored_intervals, stored_metadata
from videoflow.keys import KEY_CHARS
from videoflow.plan import CLIPS, FRAMES, Plan, VideoSource
from videoflow.recipe import BuiltStage, Recipe
from videoflow.store.gc import artifact_tables
from videoflow.store.layout import Root
from videoflow.store.ledger import QUARANTINED, quoted
from videoflow.store.reader import read_rows
from videoflow.store.writer import parts_of

_COLUMNS = ["stage", "fingerprint", "item_key", "video_key", "input_digest", "rows", "state", "class", "message", "job"]


@dataclass(frozen=True)
class Subject:
    """What a key names: a video, or one of its clips. ``uris``: the sources that hold the video's bytes."""

    video_key: str
    uris: tuple[str, ...]
    clip_key: str | None = None


@dataclass(frozen=True)
class Answer:
    """What the ledger says of a subject at one stage under one fingerprint.

    ``items``: how many results there are, by state; the other fields are those of the newest.
    """

    stage: str
    fingerprint: str
    state: str
    reason: str | None
    message: str | None
    rows: int
    job: str
    at: datetime
    items: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a recipe would do at one stage: ``what`` for people, ``changed`` the components that make it compute."""

    stage: str
    fingerprint: str
    cached: int
    to_compute: int
    what: str
    changed: tuple[str, ...] = ()


def find_subject(catalog: Catalog, key: str) -> Subject:
    """What a video key, a uri (or local path) or a clip key names.

    Raises:
        QueryError: nothing in this catalog.
    """
    sources = catalog.known_sources()
    video = next((row.video_key for row in map(sources.get, (key, os.path.abspath(key))) if row), None)
    clip = None
    if video is None and re.fullmatch(rf"[0-9a-f]{{{KEY_CHARS}}}", key):
        if any(row.video_key == key for row in sources.values()):
            video = key
        else:
            video, clip = _video_of_clip(catalog.root, key), key
    if video is None:
        raise QueryError(f"{key!r} is no uri, video key or clip key in {catalog.root.url}")
    return Subject(video, tuple(sorted(u for u, row in sources.items() if row.video_key == video)), clip)


def _video_of_clip(root: Root, clip_key: str) -> str | None:
    for table, fp in artifact_tables(root):
        for part in parts_of(root, table, fp) if table == CLIPS else []:
            path = f"{table}/{fp}/part-{part:05d}.lance"
            found = read_rows(root, path, ["video_key"], f"clip_key = {quoted(clip_key)}")
            if len(found):
                return str(found["video_key"][0])
    return None


def answers(catalog: Catalog, subject: Subject) -> list[Answer]:
    """The newest answers for a subject, by stage and fingerprint, oldest first. Of a clip's stages those for the clip
    are shown, of a video's those for its video.
    """
    where = f"video_key = {quoted(subject.video_key)}"
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in catalog.ledger.table([*_COLUMNS, "at"], where).to_pylist():
        key = (row["stage"], row["fingerprint"], row["item_key"])
        if key not in newest or newest[key]["at"] <= row["at"]:
            newest[key] = row
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (stage, fp, _), row in newest.items():
        groups.setdefault((stage, fp), []).append(row)
    tables = {fp: table for table, fp in artifact_tables(catalog.root)} if subject.clip_key else {}
    found = []
    for (stage, fp), rows in groups.items():
        if subject.clip_key:
            mine = [r for r in rows if r["item_key"] == clip_item_key(subject.clip_key, r["input_digest"] or "", fp)]
            note = catalog.root.peek_json(note_path(tables.get(fp, stage), fp)) or {}
            if not mine and note.get("grain", CLIP if len(rows) > 1 else ROWS) == CLIP:
                continue
            found.append(_answer(stage, fp, mine or rows))
        else:
            found.append(_answer(stage, fp, rows))
    return sorted(found, key=lambda a: a.at)


def _answer(stage: str, fingerprint: str, rows: list[dict[str, Any]]) -> Answer:
    last = max(rows, key=lambda r: r["at"])
    return Answer(
        stage,
        fingerprint,
        last["state"],
        last["class"],
        last["message"],
        sum(r["rows"] for r in rows),
        last["job"],
        last["at"],
        dict(Counter(r["state"] for r in rows)),
    )


def verdicts(catalog: Catalog, subject: Subject, recipe: Recipe) -> list[Verdict]:
    """What a recipe would do for a subject, stage by stage."""
    rows = [r for _, r in sorted(catalog.known_sources().items()) if r.video_key == subject.video_key]
    size, stamp = (rows[0].size, rows[0].stamp) if rows else (0, "")
    uri = subject.uris[0] if subject.uris else ""
    told, each = stored_metadata(rows), stored_intervals(rows)
    intervals, of_each = tuple(each), tuple(each.values())
    video = VideoSource(subject.video_key, uri, uri, size or 0, stamp or "", told, intervals, of_each)
    plan = Plan(catalog.root, catalog.ledger, recipe, recipe.build(), [video])
    return [_verdict(plan, b, subject) for b in plan.built]


def _verdict(plan: Plan, built: BuiltStage, subject: Subject) -> Verdict:
    if plan.unusable().any() and built.name != "probe":
        return Verdict(built.key, built.fingerprint, 0, 0, "not computed: the probe quarantined the video")
    wanted, waits = _wanted(plan, built, subject)
    if waits:
        return Verdict(built.key, built.fingerprint, 0, 0, waits)
    answers = plan.answers(built, [w.item_key for w in wanted])
    states = [(w, answers.get(w.item_key)) for w in wanted]
    missing = [w for w, s in states if s is None]
    bad = [s for _, s in states if s is not None and s.state == QUARANTINED]
    if not missing:
        what = f"cached: {_counted(s.state for _, s in states if s)}"
        if bad:
            what += f"; {bad[0].reason}: {bad[0].message} (tried again only after `videoflow quarantine retry`)"
        return Verdict(built.key, built.fingerprint, len(states), 0, what)
    history = StageHistory(plan.root, plan.ledger, built, video_key=subject.video_key)
    pasts = [past for past in history.pasts(missing) if past]
    changed = tuple(sorted({name for p in pasts for name in p.changed}))
    if pasts:
        newest = max(pasts, key=lambda p: p.at)
        what = f"computed again: {', '.join(changed)} changed since {newest.at:%Y-%m-%d %H:%M} ({newest.fingerprint})"
    elif history.has_retry(missing):
        what = "computed: it is to be tried again"
    else:
        what = "computed: never computed before"
    if len(states) > 1:
        what = f"{len(missing)} of {len(states)} items {what}"
    return Verdict(built.key, built.fingerprint, len(states) - len(missing), len(missing), what, changed)


def _wanted(plan: Plan, built: BuiltStage, subject: Subject) -> tuple[list[Wanted], str]:
    """The items of a stage for a subject, or why there are none yet."""
    video, grain = subject.video_key, grain_of(built)
    if grain == PASS:
        return [Wanted.of_pass(video, plan.recipe.stream, plan.pass_key(built, video))], ""
    if grain == ROWS:
        item = next(iter(plan.rows_items(built, np.ones(1, bool))), None)
        waits = f"waits for {', '.join(built.stage.inputs)}: its item shows once they are there"
        return ([Wanted.of_rows(item)], "") if item else ([], waits)
    frames = plan.named(FRAMES)
    if not (plan.named(CLIPS) and frames):
        return [], "not computed: the recipe has no clips"
    if not plan.answers(frames, [plan.pass_key(frames, video)]):
        return [], f"waits for {FRAMES}: its pictures are still to be cached"
    clips = plan.clips()
    table = clips.table.select(["video_key", "clip_key"])
    items = plan.clip_items(built, clips)
    rows = zip(*(c.to_pylist() for c in [table["video_key"], items.inputs, items.keys, table["clip_key"]]), strict=True)
    wanted = [Wanted.of_clip(*row) for row in rows if subject.clip_key in (None, row[3]) and row[2] is not None]
    if not wanted and len(table) and not items.exists.any():
        return [], "no item: the clip is not chosen, or the payload it reads is still to be made"
    if not wanted:
        which = "the clip is none that this recipe cuts so far" if subject.clip_key else "no clips are there yet"
        return [], f"waits for {CLIPS}: {which}"
    return wanted, ""


def _counted(states: Iterable[str]) -> str:
    counts = Counter(states)
    return ", ".join(s if n == 1 and len(counts) == 1 else f"{n} {s}" for s, n in counts.items()) or "nothing to do"
