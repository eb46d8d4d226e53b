"""A job: one run of a plan, from sources to a published version. Everything it does can be stopped at any moment and is
picked up by running the same command again: resume = wanted − ledger − staged.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import pyarrow as pa

from videoflow.dataset.assemble import CachedClip, version_table
from videoflow.dataset.catalog import Catalog, check_name
from videoflow.dataset.publish import publish, split_of
from videoflow.dataset.version import Version
from videoflow.errors import EXIT_OK, EXIT_QUARANTINED, SourceError
from videoflow.identify import Identified, identify
from videoflow.plan import CLIPS, FRAMES, Plan
from videoflow.recipe import BuiltStage, Recipe
from videoflow.sources import Scan, scan
from videoflow.stage import ClipStage
from videoflow.store.commit import Committer
from videoflow.store.reader import PART, ROW_ID, rows_of
from videoflow.store.writer import ensure_target
from videoflow.unit import Engine, StageWork, Unit, UnitReport, make_engine

UNITS_PER_WORKER = 4
MAX_VIDEOS_PER_UNIT, MAX_SOURCE_BYTES_PER_UNIT = 64, 2 << 30
MAX_ROWS_ITEMS_PER_UNIT, MAX_CLIPS_PER_UNIT = 1000, 2000
#: A pass over the same missing items is planned again at most this often (another job may have taken some).
MAX_ROUNDS = 3


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


class Job:
    """One run. ``make_progress`` parts are called in the caller's thread."""

    def __init__(self, recipe: Recipe, sources: Sequence[str], *, root: str, name: str, options: JobOptions, progress: Progress) -> None:
        self.id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._recipe = recipe
        self._sources = [*recipe.sources, *sources]
        self._root, self._name = root, check_name(name)
        self._options = options
        self._progress = progress
        self._workers = options.workers or os.cpu_count() or 1
        self.summary = JobSummary(self.id)

    def run(self) -> JobSummary:
        """Run to the end.

        Raises:
            InputError: the recipe, a source or the name. SystemFailure: the job stopped; run the same again to resume.
        """
        began = time.monotonic()
        built = self._recipe.build()
        if not self._sources:
            raise SourceError("no sources: give --source or list them in the recipe under sources:")
        found = scan(self._sources)
        if not found.files:
            raise SourceError(f"no video among the sources ({len(found.ignored)} other files); known extensions are in docs/sources.md")
        catalog = Catalog.open(self._root, create=True)
        record = self._begin(catalog)
        try:
            self._run(catalog, built, found)
        except BaseException as e:
            self._end(catalog, record, "stopped", began, error=f"{type(e).__name__}: {e}")
            raise
        self._end(catalog, record, "finished", began)
        return self.summary

    def _run(self, catalog: Catalog, built: Sequence[BuiltStage], found: Scan) -> None:
        self._progress.begin("sources", len(found.files), "files")
        one = UnitReport((), 1)
        identified = identify(catalog, found, job=self.id, on_file=lambda: self._progress.advance("sources", one))
        self._note_sources(identified, found)
        plan = Plan(catalog.root, catalog.ledger, self._recipe, built, identified.videos)
        committer = Committer(catalog.root, catalog.ledger)
        for b in built:
            if committer.recover(b.name, b.fingerprint):
                self._progress.note(f"{b.key}: took over units that an earlier run had left")
                plan.refresh(b.key)
        engine: list[Engine] = []  # made when there is work: a second run starts nothing
        try:
            self._decode(plan, committer, engine)
            for b in plan.row_stages:
                self._stage(plan, committer, engine, b, lambda b=b: plan.rows_items(b), "videos", MAX_ROWS_ITEMS_PER_UNIT)
            clips, without = plan.clips() if plan.named(CLIPS) and plan.named(FRAMES) else ([], 0)
            for b in plan.clip_stages:
                self._stage(plan, committer, engine, b, lambda b=b: plan.clip_items(b, clips), "clips", MAX_CLIPS_PER_UNIT)
        finally:
            for e in engine:
                e.close()
        self._finish(catalog, plan, clips, without, identified)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan, committer: Committer, engine: list[Engine]) -> None:
        for _ in range(MAX_ROUNDS):
            groups = plan.missing_products()
            if not groups:
                return
            units = []
            for keys, videos in groups.items():
                works = tuple(self._work(plan, b) for b in plan.consumers if b.key in keys)
                for some in _cut(sorted(videos, key=lambda v: v.video_key), self._workers, MAX_VIDEOS_PER_UNIT, lambda v: v.size):
                    units.append(Unit(works, tuple(v.decode_item for v in some), plan.root, self.id, plan.recipe.stream))
            self._execute("decode", plan, committer, engine, units, "videos")
            plan.refresh(*(b.key for b in plan.consumers))

    def _stage(
        self,
        plan: Plan,
        committer: Committer,
        engine: list[Engine],
        built: BuiltStage,
        items: Callable[[], list[Any]],
        unit: str,
        most: int,
    ) -> None:
        for _ in range(MAX_ROUNDS):
            missing = [i for i in items() if plan.state(built, i.item_key) is None]
            if not missing:
                return
            inputs = [FRAMES] if isinstance(built.stage, ClipStage) else list(built.stage.inputs)
            tables = {n: plan.parts(source) for n in inputs if (source := plan.named(n))}
            work = (self._work(plan, built),)
            units = [
                Unit(work, tuple(some), plan.root, self.id, tables=tables) for some in _cut(missing, self._workers, most, lambda _: 1)
            ]
            self._execute(built.key, plan, committer, engine, units, unit)
            plan.refresh(built.key)

    def _work(self, plan: Plan, b: BuiltStage) -> StageWork:
        target = ensure_target(plan.root, stage=b.name, fingerprint=b.fingerprint, table=b.table, schema=b.stage.schema())
        return StageWork(b.stage, b.fingerprint, target)

    def _execute(
        self, stage: str, plan: Plan, committer: Committer, engine: list[Engine], units: list[Unit], unit: str
    ) -> None:
        if not engine:
            engine.append(make_engine(self._options.engine, workers=self._workers, memory_bytes=self._options.memory_bytes))
        self._progress.begin(stage, sum(len(u.items) for u in units), unit)
        began = time.monotonic()
        totals = self.summary.stages.setdefault(stage, {"items": 0, "quarantined": 0, "worker_seconds": 0.0, "seconds": 0.0})
        for report in engine[0].run(units):
            committer.commit(report.records)
            totals["items"] += report.items
            totals["quarantined"] += report.quarantined
            totals["worker_seconds"] += report.seconds
            self.summary.decoded_videos += report.decoded_videos
            self.summary.frames_decoded += report.frames_decoded
            self._progress.advance(stage, report)
        totals["seconds"] += time.monotonic() - began

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, catalog: Catalog, plan: Plan, clips: list[CachedClip], without: int, identified: Identified) -> None:
        states = plan.video_states(clips)
        s = self.summary
        s.videos = len(plan.videos) + len(identified.unreadable)
        s.done, s.filtered, s.pending = states["done"], states["filtered"], states["pending"]
        s.quarantined = states["quarantined"] + len(identified.unreadable)
        s.clips_without_frames = without
        if plan.named(CLIPS) and plan.named(FRAMES):
            version, s.is_new_version = self._publish(catalog, plan, clips)
            s.version, s.clips = version.id, version.num_clips
        allowed = max(1, math.ceil(self._options.max_quarantined * s.videos))
        if s.quarantined > allowed or (s.videos and not s.done):
            s.exit_code = EXIT_QUARANTINED

    def _publish(self, catalog: Catalog, plan: Plan, clips: list[CachedClip]) -> tuple[Version, bool]:
        sources = {k: (v.uri, v.metadata) for k, v in plan.videos.items()}
        by = plan.recipe.split_by
        splits = {
            k: split_of(k if by == "video" else str(v.metadata.get(by, k)), plan.recipe.split) for k, v in plan.videos.items()
        }
        embeddings, scores = _clip_products(plan, clips)
        table = version_table(clips, sources=sources, splits=splits, embeddings=embeddings, scores=scores)
        tables = {FRAMES: list(plan.parts(_required(plan, FRAMES)))}
        embed = next((b for b in plan.clip_stages if b.table == "embeddings"), None)
        if embed:
            tables["embeddings"] = list(plan.parts(embed))
        manifest = {"job": self.id, "recipe": plan.recipe.model_dump(mode="json"), "tables": tables}
        fingerprints = {b.key: b.fingerprint for b in plan.built}
        return publish(catalog, self._name, table, manifest=manifest, fingerprints=fingerprints)

    # -- records -----------------------------------------------------------------------------------------------------

    def _note_sources(self, identified: Identified, found: Scan) -> None:
        s = self.summary
        s.ignored = len(found.ignored)
        s.changed, s.vanished, s.duplicates = identified.changed, identified.vanished, identified.duplicates
        for what, uris in (("changed since the last run", identified.changed), ("vanished since the last run", identified.vanished)):
            if uris:
                more = f" and {len(uris) - 5} more" if len(uris) > 5 else ""
                self._progress.note(f"{len(uris)} sources {what}: {', '.join(uris[:5])}{more}")

    def _begin(self, catalog: Catalog) -> dict[str, Any]:
        record = {
            "job": self.id,
            "name": self._name,
            "recipe": self._recipe.model_dump(mode="json"),
            "sources": self._sources_shown(),
            "options": asdict(self._options),
            "started": datetime.now(UTC).isoformat(),
            "state": "running",
        }
        catalog.write_job(self.id, record)
        return record

    def _sources_shown(self) -> list[str]:
        from videoflow.sources import printable

        return [printable(s) for s in self._sources]

    def _end(self, catalog: Catalog, record: dict[str, Any], state: str, began: float, error: str | None = None) -> None:
        self.summary.seconds = round(time.monotonic() - began, 3)
        record.update(state=state, ended=datetime.now(UTC).isoformat(), summary=self.summary.to_dict(), error=error)
        try:
            catalog.write_job(self.id, record)
        except Exception:
            if error is None:  # the first failure is the one to show
                raise


def _required(plan: Plan, name: str) -> BuiltStage:
    built = plan.named(name)
    assert built is not None
    return built


def _clip_products(
    plan: Plan, clips: list[CachedClip]
) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Any]]]:
    """What clip stages made: embedding rows by clip key, and scalar columns of other stages as ``<key>_<column>``."""
    embeddings: dict[str, tuple[int, int]] = {}
    scores: dict[str, dict[str, Any]] = {}
    embedded = False
    for b in plan.clip_stages:
        keys = {i.item_key: i.clip.clip_key for i in plan.clip_items(b, clips)}
        head = {"item_key", "input_digest", "video_key", "stream", "clip_key"}
        scalars = [f.name for f in b.stage.schema() if f.name not in head and not pa.types.is_nested(f.type)]
        table = rows_of(plan.root, plan.parts(b), keys, columns=scalars, with_row_ids=True) if keys else None
        if table is None:
            continue
        for row in table.to_pylist():
            clip = keys[row["item_key"]]
            if b.table == "embeddings" and not embedded:
                embeddings[clip] = (row[PART], row[ROW_ID])
            for name in scalars:
                if b.table != "embeddings":
                    scores.setdefault(f"{b.key}_{name}", {})[clip] = row[name]
        embedded = embedded or b.table == "embeddings"
    return embeddings, scores


def _cut(items: Sequence[Any], workers: int, most: int, weight: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cut a list into units: at most ``most`` items and a bounded weight, and at least four units a worker if it can be."""
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
