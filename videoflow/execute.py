"""Carrying out a plan: what is missing is cut into units, run by an engine, and committed as the reports come in.

An item that another job took meanwhile is planned again; whatever a stopped run had staged is taken over first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from videoflow.chosen import SourceUnits, source_units, tables_read
from videoflow.dataset.placed import PlacedClips
from videoflow.errors import EXIT_OK, InputError, shown
from videoflow.headers import known_headers
from videoflow.history import write_note
from videoflow.plan import FRAMES, Plan, VideoSource
from videoflow.recipe import BuiltStage
from videoflow.split import LongVideos
from videoflow.stage import SourceStage
from videoflow.store.commit import Committer
from videoflow.store.writer import ensure_target
from videoflow.telemetry.watch import JobWatch
from videoflow.unit import Engine, StageWork, Unit, UnitReport, Units, UnitsToCome, make_engine

UNITS_PER_WORKER = 4
MAX_VIDEOS_PER_UNIT, MAX_SOURCE_BYTES_PER_UNIT = 64, 2 << 30
MAX_ROWS_ITEMS_PER_UNIT, MAX_CLIPS_PER_UNIT = 1000, 2000
#: A stage with missing items is planned again (another job may have taken some) as long as they become fewer; where
#: they do not, at most this often.
MAX_ROUNDS = 3
MAX_WORKERS = 1024
#: What a decoding process takes before it opens a video (FFmpeg, OpenCV, Arrow), with room to work in.
MIN_MEMORY_BYTES = 256 << 20


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
    ignored_why: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    decoded_videos: int = 0
    frames_decoded: int = 0
    decoded_intervals: int = 0
    intervals_from_start: int = 0
    heard_videos: int = 0  # whose audio stream was decoded, and no picture
    clips: int = 0
    seconds: float = 0.0
    is_new_version: bool = True
    clips_without_frames: int = 0
    changed: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    duplicates: int = 0
    exit_code: int = EXIT_OK
    no_version: str | None = None  # why none was published
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class JobOptions:
    """How to run, as opposed to what. ``workers`` None: one a core, of the cluster where it runs on one.
    ``max_quarantined``: share of videos.
    """

    engine: str = "ray"
    workers: int | None = None
    memory_bytes: int | None = None
    max_quarantined: float = 0.10

    def __post_init__(self) -> None:
        """Raises InputError for a value that no run can use."""
        if not isinstance(self.engine, str):
            raise InputError(f"engine={shown(self.engine)} is no engine's name")
        for name, least, most in (("workers", 1, MAX_WORKERS), ("memory_bytes", MIN_MEMORY_BYTES, 1 << 50)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                what = "--memory" if name == "memory_bytes" else "--workers"
                why = f"; a decoding process alone takes up to {least >> 20} MiB" if what == "--memory" else ""
                raise InputError(f"{what} {shown(value)} must be a whole number from {least} to {most}{why}")
        share = self.max_quarantined
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
            raise InputError(f"max_quarantined={shown(share)} must be a share from 0 to 1")


class Execution:
    """Runs the stages of one plan. The engine starts with the first unit: a run with nothing to do starts nothing."""

    def __init__(
        self,
        plan: Plan,
        job: str,
        options: JobOptions,
        progress: Progress,
        summary: JobSummary,
        *,
        watch: JobWatch | None = None,
    ) -> None:
        self._plan = plan
        self._job = job
        self._options = options
        self._progress = progress
        self._summary = summary
        self._watch = watch or JobWatch()
        self._committer = Committer(plan.root, plan.ledger)
        self._engine: Engine | None = None
        self._long = LongVideos()

    @property
    def _workers(self) -> int:
        """As many as told, else as the engine has cores for: on a cluster only the engine knows."""
        return self._options.workers or self._started().workers

    def _started(self) -> Engine:
        if self._engine is None:
            o = self._options
            self._engine = make_engine(o.engine, workers=o.workers, memory_bytes=o.memory_bytes)
        return self._engine

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
            missing = [
                (tuple(self._work(b) for b in plan.consumers if b.key in keys), sorted(videos, key=_by_key))
                for keys, videos in plan.missing_products().items()
            ]
            if not rounds.again(sum(len(videos) for _, videos in missing)):
                return
            self._decode_cut(missing)
            for reason in self._long.reasons():
                self._progress.note(reason)
            whole = []
            for works, found in missing:
                videos = self._uncut(found)
                headers = known_headers(plan, works, videos)
                for some in cut(videos, len(videos), self._workers, MAX_VIDEOS_PER_UNIT, lambda v: v.size):
                    items = tuple(replace(v.decode_item, header=headers.get(v.video_key)) for v in some)
                    whole.append(self._unit(works, items))
            if whole:
                self._execute("decode", whole, sum(len(u.items) for u in whole), "videos")
            plan.refresh(*(b.key for b in plan.consumers))

    def _decode_cut(self, missing: Sequence[tuple[tuple[StageWork, ...], list[VideoSource]]]) -> None:
        """Long videos that can be cut between workers, in parts; `_uncut` leaves them out then."""
        self._long.begin_round()
        wanted = self._workers * UNITS_PER_WORKER if self._workers > 1 else 0
        share = wanted / sum(len(videos) for _, videos in missing)
        looks = [(works, item) for works, videos in missing for item in self._long.to_look_into(works, videos, share)]
        if not looks:
            return
        self._execute("long videos", [self._unit(works, (item,)) for works, item in looks], len(looks), "videos")
        parts = [(works, part) for works, item in looks for part in self._long.parts_of(item.video.video_key)]
        if not parts:
            return
        self._execute("decode parts", [self._unit(works, (part,)) for works, part in parts], len(parts), "parts")
        by_video = {part.video.video_key: works for works, part in parts}
        joins = [self._unit(by_video[item.video.video_key], (item,)) for item in self._long.joins()]
        if joins:
            self._execute("join parts", joins, len(joins), "videos")

    def _uncut(self, videos: list[VideoSource]) -> list[VideoSource]:
        return [v for v in videos if not self._long.was_joined(v.video_key)]

    def _unit(self, works: tuple[StageWork, ...], items: tuple[Any, ...]) -> Unit:
        return Unit(works, items, self._plan.root, self._job, self._plan.recipe.stream)

    def _account(self) -> None:
        """Write down what follows from a quarantined probe, so that every item of every stage has an end."""
        found = self._plan.unaccounted()
        self._plan.ledger.append([(b.name, b.fingerprint, "", result) for b, result in found], job=self._job)
        if found:
            self._plan.refresh(*{b.key for b, _ in found})

    def rows(self, built: BuiltStage) -> None:
        """A VideoStage over all videos whose inputs are there."""
        plan = self._plan
        tables = {n: plan.parts(source) for n in built.stage.inputs if (source := plan.named(n))}
        rounds = _Rounds()
        while True:
            missing = plan.items(built).missing
            count = int(missing.sum())
            if not rounds.again(count):
                return
            items = plan.rows_items(built, missing)
            self._stage(built, items, count, tables=tables, most=MAX_ROWS_ITEMS_PER_UNIT, counted="videos")

    def clips(self, built: BuiltStage, clips: PlacedClips) -> None:
        """A ClipStage or SourceStage over placed clips."""
        plan, tables = self._plan, tables_read(self._plan, built, frames=FRAMES)
        rounds = _Rounds()
        while True:
            items = plan.clip_items(built, clips)
            count = int(items.missing.sum())
            if not rounds.again(count):
                return
            if isinstance(built.stage, SourceStage):
                self._sources(built, source_units(plan, built, clips, items, self._workers), tables)
                continue
            missing = plan.missing_clips(built, clips, items)
            self._stage(built, missing, count, tables=tables, most=MAX_CLIPS_PER_UNIT, counted="clips")

    def _sources(self, built: BuiltStage, found: SourceUnits, tables: dict[str, tuple[str, ...]]) -> None:
        """One round over the chosen clips of a SourceStage that have no result."""
        work, root = (self._work(built),), self._plan.root
        units = (Unit(work, items, root, self._job, tables=tables) for items in found)
        self._execute(built.key, UnitsToCome(len(found), units), found.num_clips, "clips")
        self._plan.refresh(built.key)

    def _stage(
        self,
        built: BuiltStage,
        items: Iterable[Any],
        count: int,
        *,
        tables: dict[str, tuple[str, ...]],
        most: int,
        counted: str,
    ) -> None:
        """One round over the items of a stage that have no result."""
        work, root = (self._work(built),), self._plan.root
        units = (
            Unit(work, tuple(some), root, self._job, tables=tables)
            for some in cut(items, count, self._workers, most, lambda _: 1)
        )
        num_units = -(-count // per_unit(count, self._workers, most))
        self._execute(built.key, UnitsToCome(num_units, units), count, counted)
        self._plan.refresh(built.key)

    def _work(self, b: BuiltStage) -> StageWork:
        schema = b.stage.schema()
        write_note(self._plan.root, b)
        target = ensure_target(self._plan.root, stage=b.name, fingerprint=b.fingerprint, table=b.table, schema=schema)
        return StageWork(b.stage, b.fingerprint, target)

    def _execute(self, stage: str, units: Units, count: int, counted: str) -> None:
        engine = self._started()
        self._progress.begin(stage, count, counted)
        began, s, left = time.monotonic(), self._summary, dict[str, str]()
        totals = s.stages.setdefault(stage, {"items": 0, "quarantined": 0, "worker_seconds": 0.0, "seconds": 0.0})
        for report in self._watch.reports(engine, stage, counted, units, engine.run(units)):
            with self._watch.committing():
                self._committer.commit(report.records)
            totals["items"] += report.items
            totals["quarantined"] += report.quarantined
            totals["worker_seconds"] += report.seconds
            s.decoded_videos += report.decoded_videos
            s.frames_decoded += report.frames_decoded
            s.decoded_intervals += report.decoded_intervals
            s.intervals_from_start += report.intervals_from_start
            s.heard_videos += report.heard_videos
            self._long.took(report)
            left |= report.left_to_cpu
            self._progress.advance(stage, report)
        totals["seconds"] += time.monotonic() - began
        for why, n in Counter(left.values()).items():
            self._progress.note(f"{n} {'video was' if n == 1 else 'videos were'} left to the CPU by nvdec: {why}")


def _by_key(video: VideoSource) -> str:
    return video.video_key


def per_unit(count: int, workers: int, most: int) -> int:
    """How many of ``count`` items make a unit: at most ``most``, and at least four units a worker if it can be."""
    return max(1, min(most, -(-count // (workers * UNITS_PER_WORKER))))


def cut(items: Iterable[Any], count: int, workers: int, most: int, weight: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cut ``count`` items into units: at most ``most`` items and a bounded weight, and at least four units a worker if
    it can be.
    """
    enough = per_unit(count, workers, most)
    held: list[Any] = []
    held_weight = 0
    for item in items:
        if held and (len(held) >= enough or held_weight + weight(item) > MAX_SOURCE_BYTES_PER_UNIT):
            yield held
            held, held_weight = [], 0
        held.append(item)
        held_weight += weight(item)
    if held:
        yield held
