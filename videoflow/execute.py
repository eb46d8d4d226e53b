"""Carrying out a plan: what is missing is cut into units, run by an engine, and committed as the reports come in.

An item that another job took meanwhile is planned again; whatever a stopped run had staged is taken over first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from videoflow.dataset.assemble import CachedClip
from videoflow.errors import EXIT_OK
from videoflow.history import write_note
from videoflow.plan import FRAMES, Plan
from videoflow.recipe import BuiltStage
from videoflow.store.commit import Committer
from videoflow.store.writer import ensure_target
from videoflow.unit import Engine, StageWork, Unit, UnitReport, make_engine

UNITS_PER_WORKER = 4
MAX_VIDEOS_PER_UNIT, MAX_SOURCE_BYTES_PER_UNIT = 64, 2 << 30
MAX_ROWS_ITEMS_PER_UNIT, MAX_CLIPS_PER_UNIT = 1000, 2000
#: A stage with missing items is planned again (another job may have taken some) as long as they become fewer; where
#: they do not, at most this often.
MAX_ROUNDS = 3


class _Rounds:
    """Says whether a stage is to be planned once more."""

    def __init__(self) -> None:
        self._left, self._least = MAX_ROUNDS, float("inf")

    def again(self, missing: int) -> bool:
        """True if items are missing, and there is hope."""
        if missing < self._least:
            self._left, self._least = MAX_ROUNDS, missing
        self._left -= 1
        return missing > 0 and self._left >= 0


class Progress(Protocol):
    """What a job tells while it runs."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage begins with ``total`` items left (``unit``: files, videos or clips)."""

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass
class JobSummary:
    """What `run --json` prints, and more. videos = done + filtered + quarantined + pending."""

    job: str
    version: str | None = None
    videos: int = 0
    done: int = 0
    filtered: int = 0
    quarantined: int = 0
    ignored: int = 0
    pending: int = 0
    decoded_videos: int = 0
    frames_decoded: int = 0
    clips: int = 0
    seconds: float = 0.0
    is_new_version: bool = True
    clips_without_frames: int = 0
    changed: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    duplicates: int = 0
    exit_code: int = EXIT_OK
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class JobOptions:
    """How to run, as opposed to what. ``workers`` None: one a core. ``max_quarantined``: share of videos."""

    engine: str = "ray"
    workers: int | None = None
    memory_bytes: int | None = None
    max_quarantined: float = 0.10


class Execution:
    """Runs the stages of one plan. The engine starts with the first unit: a run with nothing to do starts nothing."""

    def __init__(self, plan: Plan, job: str, options: JobOptions, progress: Progress, summary: JobSummary) -> None:
        self._plan = plan
        self._job = job
        self._options = options
        self._progress = progress
        self._summary = summary
        self._workers = options.workers or os.cpu_count() or 1
        self._committer = Committer(plan.root, plan.ledger)
        self._engine: Engine | None = None

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def recover(self) -> None:
        """Commit what earlier runs left staged; take back answers whose table is gone or whose source was unread."""
        for b in self._plan.built:
            if lost := self._plan.lost[b.key]:
                why = f"the table {b.table}/{b.fingerprint} is gone"
                self._plan.ledger.reopen(b.name, b.fingerprint, lost, why=why, job=self._job)
                self._progress.note(f"{b.key}: {len(lost)} results are computed again, {why}")
            if self._committer.recover(b.name, b.fingerprint):
                self._progress.note(f"{b.key}: took over units that an earlier run had left")
                self._plan.refresh(b.key)
            if unread := self._plan.unread(b):
                why = "the source was moved under an earlier job"
                self._plan.ledger.reopen(b.name, b.fingerprint, unread, why=why, job=self._job)
                self._plan.refresh(b.key)

    def decode(self) -> None:
        """One pass over every video that lacks a product, for all products it lacks."""
        plan, rounds = self._plan, _Rounds()
        while True:
            self._account()
            units = []
            for keys, videos in plan.missing_products().items():
                works = tuple(self._work(b) for b in plan.consumers if b.key in keys)
                ordered = sorted(videos, key=lambda v: v.video_key)
                for some in cut(ordered, self._workers, MAX_VIDEOS_PER_UNIT, lambda v: v.size):
                    items = tuple(v.decode_item for v in some)
                    units.append(Unit(works, items, plan.root, self._job, plan.recipe.stream))
            if not rounds.again(sum(len(u.items) for u in units)):
                return
            self._execute("decode", units, "videos")
            plan.refresh(*(b.key for b in plan.consumers))

    def _account(self) -> None:
        """Write down what follows from a quarantined probe, so that every item of every stage has an end."""
        found = self._plan.unaccounted()
        self._plan.ledger.append([(b.name, b.fingerprint, "", result) for b, result in found], job=self._job)
        if found:
            self._plan.refresh(*{b.key for b, _ in found})

    def rows(self, built: BuiltStage) -> None:
        """A VideoStage over all videos whose inputs are there."""
        inputs = {n: self._plan.parts(source) for n in built.stage.inputs if (source := self._plan.named(n))}
        self._stage(built, lambda: self._plan.rows_items(built), inputs, MAX_ROWS_ITEMS_PER_UNIT)

    def clips(self, built: BuiltStage, clips: Sequence[CachedClip]) -> None:
        """A ClipStage over placed clips."""
        source = self._plan.named(FRAMES)
        inputs = {FRAMES: self._plan.parts(source)} if source else {}
        self._stage(built, lambda: self._plan.clip_items(built, clips), inputs, MAX_CLIPS_PER_UNIT)

    def _stage(
        self, built: BuiltStage, items: Callable[[], list[Any]], tables: dict[str, tuple[str, ...]], most: int
    ) -> None:
        rounds = _Rounds()
        while True:
            missing = [i for i in items() if self._plan.state(built, i.item_key) is None]
            if not rounds.again(len(missing)):
                return
            work = (self._work(built),)
            units = [
                Unit(work, tuple(some), self._plan.root, self._job, tables=tables)
                for some in cut(missing, self._workers, most, lambda _: 1)
            ]
            self._execute(built.key, units, "videos" if most == MAX_ROWS_ITEMS_PER_UNIT else "clips")
            self._plan.refresh(built.key)

    def _work(self, b: BuiltStage) -> StageWork:
        schema = b.stage.schema()
        write_note(self._plan.root, b)
        target = ensure_target(self._plan.root, stage=b.name, fingerprint=b.fingerprint, table=b.table, schema=schema)
        return StageWork(b.stage, b.fingerprint, target)

    def _execute(self, stage: str, units: list[Unit], counted: str) -> None:
        if self._engine is None:
            o = self._options
            self._engine = make_engine(o.engine, workers=self._workers, memory_bytes=o.memory_bytes)
        self._progress.begin(stage, sum(len(u.items) for u in units), counted)
        began, s = time.monotonic(), self._summary
        totals = s.stages.setdefault(stage, {"items": 0, "quarantined": 0, "worker_seconds": 0.0, "seconds": 0.0})
        for report in self._engine.run(units):
            self._committer.commit(report.records)
            totals["items"] += report.items
            totals["quarantined"] += report.quarantined
            totals["worker_seconds"] += report.seconds
            s.decoded_videos += report.decoded_videos
            s.frames_decoded += report.frames_decoded
            self._progress.advance(stage, report)
        totals["seconds"] += time.monotonic() - began


def cut(items: Sequence[Any], workers: int, most: int, weight: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cut a list into units: at most ``most`` items and a bounded weight, and at least four units a worker if it can
    be.
    """
    per_unit = max(1, min(most, -(-len(items) // (workers * UNITS_PER_WORKER))))
    held: list[Any] = []
    held_weight = 0
    for item in items:
        if held and (len(held) >= per_unit or held_weight + weight(item) > MAX_SOURCE_BYTES_PER_UNIT):
            yield held
            held, held_weight = [], 0
        held.append(item)
        held_weight += weight(item)
    if held:
        yield held
