"""What is known of a job while it runs and afterwards, as plain numbers: by stage, by worker, by queue.

Snapshots of workers merge by adding: each says what one worker has done in one run of a stage. docs/watching.md has the
words; a test holds it and METRICS equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from videoflow.telemetry.meter import GROUP_OF, GROUPS, WorkerSnapshot

#: The stage in which the driver itself reads the sources to name them by content.
SOURCES = "sources"
#: Of larger jobs only so many workers are listed one by one.
MAX_WORKERS_LISTED = 64


@dataclass(frozen=True)
class Metric:
    """One Prometheus metric: ``labels`` beside the job."""

    name: str
    kind: str  # counter | gauge
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("videoflow_items_total", "counter", ("stage",), "items that ended, whatever their state"),
    Metric("videoflow_frames_total", "counter", ("stage",), "frames decoded, those of running units included"),
    Metric("videoflow_read_bytes_total", "counter", ("stage",), "bytes of sources and of cached frames that were read"),
    Metric("videoflow_written_bytes_total", "counter", ("stage",), "bytes of rows handed to the catalog"),
    Metric("videoflow_stage_seconds_total", "counter", ("stage",), "how long the stage has run"),
    Metric("videoflow_worker_seconds_total", "counter", ("stage", "state"), "workers' time by state"),
    Metric(
        "videoflow_consumer_seconds_total",
        "counter",
        ("stage", "consumer"),
        "state consume by stage that rides the pass",
    ),
    Metric(
        "videoflow_driver_seconds_total",
        "counter",
        ("stage", "state"),
        "the driver's time: start_up, wait, commit, other",
    ),
    Metric(
        "videoflow_units", "gauge", ("stage", "queue"), "units queued, running, waiting for their commit, committed"
    ),
    Metric("videoflow_workers", "gauge", ("stage",), "workers of the stage"),
    Metric("videoflow_rss_bytes", "gauge", ("process",), "resident memory: driver, workers, children"),
    Metric("videoflow_bottleneck", "gauge", ("stage", "bottleneck"), "1 for what the verdict names"),
)


@dataclass(frozen=True)
class Units:
    """Where a stage's units are. ``mean_waiting``: how many finished ones lay there, on average, when one was taken."""

    total: int = 0
    queued: int = 0
    running: int = 0
    waiting: int = 0
    committed: int = 0
    mean_waiting: float = 0.0


@dataclass(frozen=True)
class StageFigures:
    """One stage. Seconds are floats for people; ``states`` adds up over its workers, ``driver`` over its runs.

    Attributes:
        counted: what an item is: files, videos or clips.
        seconds: from its begin until now or its end, all its runs together.
        items_per_second, frames_per_second: of late while it runs, over all of it afterwards.
        states: workers' seconds by state. consumers: the part of ``consume`` that each riding stage has.
        driver: the driver's seconds: start_up, wait, commit, other.
    """

    stage: str
    counted: str
    running: bool
    seconds: float
    workers: int
    units: Units
    items: int = 0
    frames: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    items_per_second: float = 0.0
    frames_per_second: float = 0.0
    states: Mapping[str, float] = field(default_factory=dict)
    consumers: Mapping[str, float] = field(default_factory=dict)
    driver: Mapping[str, float] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float:
        """All workers' time together."""
        return sum(self.states.values())

    @property
    def shares(self) -> dict[str, float]:
        """Busy, blocked and idle as shares of the workers' time; they sum to 1 (or are all 0)."""
        whole = self.worker_seconds
        sums = dict.fromkeys(GROUPS, 0.0)
        for state, seconds in self.states.items():
            sums[GROUP_OF[state]] += seconds / whole if whole else 0.0
        return sums

    @property
    def running_seconds(self) -> float:
        """The stage's time without the start of its workers, of their children and models."""
        starting = self.driver.get("start_up", 0.0) + self.states.get("start_up", 0.0) / max(1, self.workers)
        return max(self.seconds - starting, self.driver.get("commit", 0.0))

    @property
    def commit_seconds(self) -> float:
        """How long one unit's commit takes."""
        return self.driver.get("commit", 0.0) / self.units.committed if self.units.committed else 0.0

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self) | {"shares": self.shares}
        return {k: rounded(v) for k, v in plain.items()}


@dataclass(frozen=True)
class Memory:
    """Resident bytes; a page that processes share counts in each of them. ``peak``: the largest sum that was seen."""

    driver: int = 0
    workers: int = 0
    children: int = 0
    peak: int = 0


@dataclass(frozen=True)
class JobFigures:
    """A job at one moment.

    Attributes:
        workers: those of the stage that runs. verdicts: one a stage. verdict: the job's, one of them.
    """

    at: float
    stages: tuple[StageFigures, ...]
    workers: tuple[WorkerSnapshot, ...]
    memory: Memory
    verdicts: Mapping[str, Any]
    verdict: Any

    @property
    def running(self) -> StageFigures | None:
        """The stage that runs."""
        return next((s for s in reversed(self.stages) if s.running), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text, for JSON."""
        listed = self.workers[:MAX_WORKERS_LISTED]
        return {
            "at": round(self.at, 3),
            "stages": {s.stage: s.to_dict() | {"verdict": self.verdicts[s.stage].to_dict()} for s in self.stages},
            "workers": [worker_figures(w) for w in listed],
            "workers_left_out": len(self.workers) - len(listed),
            "rss_bytes": asdict(self.memory),
            "verdict": self.verdict.to_dict(),
        }


def worker_figures(w: WorkerSnapshot) -> dict[str, Any]:
    """One worker for JSON, in seconds; its states sum to its seconds."""
    return {
        "worker": w.worker,
        "state": w.state,
        "seconds": w.total_ns / 1e9,
        "states": {k: v / 1e9 for k, v in w.states_ns.items()},
        "units": w.units,
        "items": w.items,
        "frames": w.frames,
        "rss_bytes": w.rss_bytes,
        "child_rss_bytes": w.child_rss_bytes,
    }


def rounded(value: Any) -> Any:
    """Milliseconds are enough to read; sums of rounded parts are off by less than one of them."""
    if isinstance(value, float):
        return round(value, 4)
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def add_seconds(into: dict[str, float], parts_ns: Mapping[str, int]) -> None:
    for name, ns in parts_ns.items():
        into[name] = into.get(name, 0.0) + ns / 1e9


def sum_of(workers: Iterable[WorkerSnapshot], name: str) -> int:
    return sum(int(getattr(w, name)) for w in workers)


def states_of(workers: Sequence[WorkerSnapshot]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by state and by riding stage, over workers."""
    states: dict[str, float] = {}
    consumers: dict[str, float] = {}
    for w in workers:
        add_seconds(states, w.states_ns)
        add_seconds(consumers, w.consumers_ns)
    return states, consumers
