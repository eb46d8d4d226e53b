"""Units of work and who runs them: the records that travel between a job, an engine and its workers.

A *unit* is a fixed list of items that becomes one fragment per stage. It is described here, built by the job, run by a
worker, and answered with a report that holds metadata only: pixels stay where they were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import entry_points
from typing import Any, Protocol

from videoflow.errors import RecipeError, nearest
from videoflow.find import load_object
from videoflow.loader.reader import ClipRef
from videoflow.stage import Stage, VideoHeader
from videoflow.store.commit import UnitRecord
from videoflow.store.layout import Root
from videoflow.store.writer import Target
from videoflow.telemetry.meter import WorkerSnapshot

ENGINE_GROUP = "videoflow.engines"


@dataclass(frozen=True)
class StageWork:
    """A stage to run and the table its rows go to."""

    stage: Stage
    fingerprint: str
    target: Target


@dataclass(frozen=True)
class DecodeItem:
    """A video to decode: ``path`` opens it, ``stamp`` and ``size`` must still hold when it is read. ``header``: what an
    earlier pass learned of it; given, its pictures are not decoded, it is only heard.
    """

    video_key: str
    path: str
    uri: str
    size: int
    stamp: str
    header: VideoHeader | None = None


@dataclass(frozen=True)
class SplitItem:
    """A long video to look into: where it may be cut into at most ``most`` parts of at least ``min_seconds``."""

    video: DecodeItem
    most: int
    min_seconds: float


@dataclass(frozen=True)
class VideoPart:
    """A part of a long video: it answers for the frames of a half-open window of pts (no end: to the last frame).

    ``keyframe_pts``: of the keyframe where decoding begins (None: at the beginning); ``start_pts``: of the whole
    video.
    """

    number: int
    window: tuple[int, int | None]
    start_pts: int
    keyframe_pts: int | None

    def owns(self, pts: int) -> bool:
        return self.window[0] <= pts and (self.window[1] is None or pts < self.window[1])


@dataclass(frozen=True)
class PartItem:
    """A part of a video to decode."""

    video: DecodeItem
    part: VideoPart


@dataclass(frozen=True)
class PartResult:
    """What came of a part: rows that are written already (``fragments`` by stage name), and what their stages need to
    join it with the others.
    """

    video_key: str
    number: int
    stream: int
    columns: dict[str, Any]
    pts: list[int]
    end_pts: int | None
    extras: dict[str, dict[str, Any]]
    fragments: dict[str, tuple[str, ...]]
    rows: dict[str, int]


@dataclass(frozen=True)
class JoinItem:
    """A video whose parts are all there, in order."""

    video: DecodeItem
    parts: tuple[PartResult, ...]


@dataclass(frozen=True)
class RowsItem:
    """A video whose rows (and metadata) a VideoStage works on; ``inputs``: item key by input stage name; ``told``: the
    metadata of the video, or of each interval where they differ; none for a stage that asks for none.
    """

    item_key: str
    input_digest: str
    video_key: str
    inputs: dict[str, str]
    intervals: tuple[tuple[Fraction, Fraction], ...] = ()
    told: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ClipItem:
    """A clip whose stored frames a ClipStage works on; ``wanted``: indices on the grid of what ``clip`` points to."""

    item_key: str
    input_digest: str
    video_key: str
    stream: int
    clip: ClipRef
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class ChosenClip:
    """A clip that a SourceStage is to make: [t0_pts, t1_pts) of its video."""

    item_key: str
    input_digest: str
    clip_key: str
    t0_pts: int
    t1_pts: int


@dataclass(frozen=True)
class SourceItem:
    """A video whose chosen clips a SourceStage works on, decoded once; ``probe_key``: its item in the videos table."""

    video: DecodeItem
    probe_key: str
    clips: tuple[ChosenClip, ...]


@dataclass(frozen=True)
class Unit:
    """A list of items for one stage, or for all consumers of a decode pass.

    Attributes:
        works: the stages; several only for a decode pass.
        items: DecodeItem, SplitItem, PartItem, JoinItem, RowsItem, ClipItem or SourceItem, all of one kind.
        stream: the recipe's choice of stream (decode pass only).
        tables: paths below the root of the parts of the tables that are read, by stage name.
    """

    works: tuple[StageWork, ...]
    items: tuple[Any, ...]
    root: Root
    job: str
    stream: int | None = None
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitReport:
    """What a worker hands back: staged records and counts, and what it has done so far (None: it does not tell).
    ``heard_videos``: whose audio was decoded and no picture.

    ``decoded_intervals``: stretches of a source that were decoded once more for chosen clips, of these
    ``intervals_from_start`` from the video's start; ``splits``: parts by video key, empty where a video cannot be cut;
    ``parts``: decoded parts; ``unfit``: videos that must be decoded unsplit after all, and why; ``left_to_cpu``:
    videos that a GPU did not decode, and why.
    """

    records: tuple[UnitRecord, ...]
    items: int
    quarantined: int = 0
    decoded_videos: int = 0
    frames_decoded: int = 0
    heard_videos: int = 0
    seconds: float = 0.0
    decoded_intervals: int = 0
    intervals_from_start: int = 0
    splits: dict[str, tuple[VideoPart, ...]] = field(default_factory=dict)
    parts: tuple[PartResult, ...] = ()
    unfit: dict[str, str] = field(default_factory=dict)
    left_to_cpu: dict[str, str] = field(default_factory=dict)
    worker: WorkerSnapshot | None = None


class Units(Protocol):
    """Units to run: how many, and one after the other, once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Unit]: ...


@dataclass(frozen=True)
class UnitsToCome:
    """Units that are made when a worker asks for the next one, so that a million items need no memory of their own."""

    count: int
    made: Iterator[Unit]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Unit]:
        return self.made


class Engine(Protocol):
    """Runs units on workers. Made once a job; ``run`` may be called several times; ``close`` leaves no process
    behind.

    It may also have ``watch() -> Sequence[WorkerSnapshot]``, how its workers are now, and ``waiting() -> int``, how
    many finished units lie there and wait to be taken: both are asked while ``run`` runs, ``watch`` from any thread.

    Attributes:
        workers: how many units run at a time.
    """

    workers: int

    def run(self, units: Units) -> Iterator[UnitReport]:
        """Reports in the order they end. A SystemFailure of a worker is raised here, after which the job stops."""

    def close(self) -> None: ...


def engine_path(name: str) -> str:
    """Dotted path of an engine by entry point name (``ray``, ``local``) or dotted path. Nothing is imported.

    Raises:
        RecipeError: unknown.
    """
    known = {e.name: e.value for e in entry_points(group=ENGINE_GROUP)}
    path = name if ":" in name else known.get(name)
    if path is None:
        raise RecipeError(f"unknown engine {name!r}{nearest(name, known)}: allowed are {', '.join(sorted(known))}")
    return path


def make_engine(name: str, *, workers: int | None, memory_bytes: int | None = None) -> Engine:
    """An engine, started. ``workers`` None: as many as it has cores for.

    Raises:
        RecipeError: unknown. MissingExtra: what it needs is not installed.
    """
    engine: Engine = load_object(engine_path(name), what="engine")(workers=workers, memory_bytes=memory_bytes)
    return engine
