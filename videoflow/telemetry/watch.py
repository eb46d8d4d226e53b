"""Watches a job from the driver: takes the workers' snapshots as they come, keeps the driver's own clock, looks at the
queues, and says at any moment how it all stands.

A thread of its own takes a sample every few seconds, for whoever listens (terminal, metrics file); the job record and
the Prometheus endpoint ask for the figures when they want them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from videoflow.telemetry.meter import Meter, WorkerSnapshot, rss_bytes
from videoflow.telemetry.metrics import SOURCES, JobFigures, Memory, StageFigures, Units, states_of, sum_of
from videoflow.telemetry.verdict import TOO_SHORT, judge, verdict_of

SAMPLE_SECONDS = 2.0
#: Rates of a running stage are those of the last so many samples.
RATE_SAMPLES = 8


class Report(Protocol):
    """What is looked at of a unit's report."""

    @property
    def items(self) -> int: ...

    @property
    def worker(self) -> WorkerSnapshot | None: ...


R = TypeVar("R", bound=Report)


@dataclass
class _Stage:
    """A stage so far: what earlier runs of it came to, and the run in hand."""

    name: str
    counted: str
    total: int = 0
    taken: int = 0
    items: int = 0
    fills: list[int] = field(default_factory=lambda: [0, 0])  # sum of units that lay waiting, looks
    workers: dict[str, WorkerSnapshot] = field(default_factory=dict)
    drivers: list[Meter] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of each run: seconds until its first worker was there
    old_keys: frozenset[str] = frozenset()
    taken_before: int = 0
    running: bool = False
    samples: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    def begin(self, units: int, driver: Meter) -> None:
        self.total += units
        self.old_keys, self.taken_before = frozenset(self.workers), self.taken
        self.drivers.append(driver)
        self.starts.append(0.0)
        self.began = time.monotonic()
        self.samples.clear()
        self.running = True

    def here(self) -> list[WorkerSnapshot]:
        """Workers of the run in hand, or of the last one."""
        return [w for k, w in list(self.workers.items()) if k not in self.old_keys]

    def see(self, workers: Iterable[WorkerSnapshot]) -> None:
        is_first = not self.here()
        for w in workers:
            if is_first:  # on the driver's clock, whatever the worker's says
                there = max(0.0, time.monotonic() - w.total_ns / 1e9 - self.began)
                self.starts[-1] = min(self.starts[-1] or there, there)
            known = self.workers.get(w.key)
            if known is None or known.total_ns <= w.total_ns:
                self.workers[w.key] = w

    def units(self) -> Units:
        here = self.here()
        left = self.total - self.taken
        waiting = min(left, max(0, sum_of(here, "units") - (self.taken - self.taken_before)))
        running = min(left - waiting, sum(w.state not in ("idle", "hand_over") for w in here))
        if not self.running:
            waiting = running = 0
        mean = self.fills[0] / self.fills[1] if self.fills[1] else 0.0
        return Units(self.total, max(0, left - waiting - running), running, waiting, self.taken, mean)

    def figures(self) -> StageFigures:
        workers = list(self.workers.values())
        states, consumers = states_of(workers)
        clocks = [d.snapshot() for d in self.drivers]
        driver, _ = states_of(clocks)
        starting = min(sum(self.starts), driver.get("wait", 0.0))
        if starting:
            driver = {"start_up": starting, **driver, "wait": driver["wait"] - starting}
        seconds = sum(c.total_ns for c in clocks) / 1e9
        frames = sum_of(workers, "frames")
        # A source has no worker but the driver: its time is the worker's.
        worker_states, driver_states = (driver, {}) if self.name == SOURCES else (states, driver)
        rates = self._rates(seconds, self.items, frames)
        return StageFigures(
            self.name,
            self.counted,
            self.running,
            seconds,
            len(self.here()) or 1,
            self.units(),
            self.items,
            frames,
            sum_of([*workers, *clocks], "bytes_read"),
            sum_of(workers, "bytes_written"),
            *rates,
            worker_states,
            consumers,
            driver_states,
        )

    def _rates(self, seconds: float, items: int, frames: int) -> tuple[float, float]:
        if self.running and len(self.samples) > 1:
            (t0, i0, f0), (t1, i1, f1) = self.samples[0], self.samples[-1]
            if t1 > t0:
                return (i1 - i0) / (t1 - t0), (f1 - f0) / (t1 - t0)
        return (items / seconds, frames / seconds) if seconds > 0 else (0.0, 0.0)


class JobWatch:
    """One job's figures. The driver's thread tells it what happens; any thread may ask."""

    def __init__(self) -> None:
        self.job = ""
        self._stages: dict[str, _Stage] = {}
        self._listeners: list[Callable[[JobFigures], None]] = []
        self._live: Callable[[], Sequence[WorkerSnapshot]] | None = None
        self._stage: _Stage | None = None
        self._peak = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what the driver tells ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sources(self, files: Sequence[Any]) -> Iterator[None]:
        """The driver reads sources to name them by content."""
        stage = self._begin(SOURCES, "files", 0, resting="fetch")
        try:
            yield
            stage.items += len(files)
        finally:
            self._end(stage)

    def reports(self, engine: Any, stage: str, counted: str, units: Sized, reports: Iterator[R]) -> Iterator[R]:
        """The same reports; what they and the engine tell of the workers is kept. An engine that has no ``watch``
        and no ``waiting`` (see videoflow/unit.py) is seen through its reports only.
        """
        here = self._begin(stage, counted, len(units))
        self._live, waiting = getattr(engine, "watch", None), getattr(engine, "waiting", None)
        try:
            while True:
                with here.drivers[-1].span("wait"):
                    report = next(reports, None)
                if report is None:
                    break
                self._take(here, report, waiting)
                yield report
        finally:
            self._collect()
            self._live = None
            self._end(here)

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """The driver commits."""
        stage = self._stage
        if stage is None:
            yield
            return
        with stage.drivers[-1].span("commit"):
            yield

    def _take(self, stage: _Stage, report: R, waiting: Callable[[], int] | None) -> None:
        with self._lock:
            if report.worker is not None:
                stage.see([report.worker])
            stage.taken += 1
            stage.items += report.items
            stage.fills[0] += waiting() if waiting else stage.units().waiting
            stage.fills[1] += 1

    def _begin(self, stage: str, counted: str, units: int, *, resting: str = "other") -> _Stage:
        with self._lock:
            here = self._stages.setdefault(stage, _Stage(stage, counted))
            here.begin(units, Meter(f"driver/{stage}", "driver", resting=resting))
            self._stage = here
            return here

    def _end(self, stage: _Stage) -> None:
        with self._lock:
            stage.drivers[-1].end()
            stage.running = False
            self._stage = None

    # -- what anybody may ask ----------------------------------------------------------------------------------------

    def figures(self) -> JobFigures:
        """How it stands now."""
        with self._lock:
            stages = tuple(s.figures() for s in self._stages.values())
            workers = tuple(self._stage.here()) if self._stage is not None else ()
            driver = rss_bytes(os.getpid())
            mine, children = sum_of(workers, "rss_bytes"), sum_of(workers, "child_rss_bytes")
            self._peak = max(self._peak, driver + mine + children)
            memory = Memory(driver, mine, children, self._peak)
            verdicts = {s.stage: judge(s) for s in stages}
            return JobFigures(time.time(), stages, workers, memory, verdicts, verdict_of(stages))

    def verdict(self) -> str | None:
        """One line on what held the job up; None where that cannot be said."""
        verdict = self.figures().verdict
        return None if verdict.bottleneck == TOO_SHORT else str(verdict)

    def listen(self, listener: Callable[[JobFigures], None]) -> None:
        """Have it told every sample, from the sampling thread."""
        self._listeners.append(listener)

    # -- sampling ----------------------------------------------------------------------------------------------------

    def start(self, job: str) -> None:
        """Begin to sample."""
        self.job = job
        self._thread = threading.Thread(target=self._sample, name="job-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples; listeners are told once more."""
        self._stop.set()
        self._live = None
        if self._stage is not None:  # the job was stopped in the middle of it
            self._end(self._stage)
        if self._thread is not None:
            self._thread.join(timeout=SAMPLE_SECONDS + 3)
            self._thread = None
            self._tell()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._collect()
            with self._lock:
                stage = self._stage
                if stage is not None:
                    f = stage.figures()
                    stage.samples.append((time.monotonic(), f.items, f.frames))
            self._tell()

    def _tell(self) -> None:
        figures = self.figures()
        for listener in self._listeners:
            with contextlib.suppress(Exception):  # who listens badly must not end the watch, nor the job
                listener(figures)

    def _collect(self) -> None:
        """Ask the engine how its workers are."""
        live = self._live
        if live is None:
            return
        try:
            workers = live()
        except Exception:  # what an engine cannot say now, it says with its reports
            return
        with self._lock:
            if self._stage is not None:
                self._stage.see(workers)
