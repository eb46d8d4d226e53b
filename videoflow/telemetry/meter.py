"""A worker's clock: at every moment a worker is in exactly one state, so its parts sum to its whole, by construction.

The work does not know the meter. An engine binds a worker's meter to the thread that runs its units; functions at the
edges of the work are marked with the state they mean (`metered`), and where no meter is bound a mark does nothing. What
happens inside a child process divides the state in which the worker waits for it (`divided`). docs/watching.md has the
words.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

BUSY, IDLE, BLOCKED_ON_INPUT, BLOCKED_ON_OUTPUT, STARTING = (
    "busy",
    "idle",
    "blocked_on_input",
    "blocked_on_output",
    "starting",
)
#: What each state counts as. Every nanosecond of a worker lies in one state, every state in one of these.
GROUP_OF: dict[str, str] = {
    "idle": IDLE,
    "start_up": STARTING,
    "fetch": BLOCKED_ON_INPUT,
    "read": BLOCKED_ON_INPUT,
    "decode": BUSY,
    "consume": BUSY,
    "unpack": BUSY,
    "process": BUSY,
    "other": BUSY,
    "write": BLOCKED_ON_OUTPUT,
    "hand_over": BLOCKED_ON_OUTPUT,
}
STATES = tuple(GROUP_OF)
GROUPS = (BUSY, BLOCKED_ON_INPUT, BLOCKED_ON_OUTPUT, IDLE, STARTING)
#: States of the driver while a stage runs: no worker is there yet, waiting for a report, committing one, all the rest.
DRIVER_STATES = ("start_up", "wait", "commit", "other")


@dataclass(frozen=True)
class WorkerSnapshot:
    """What one worker has done in one run of a stage, from its start until ``at``. A newer one replaces an older one.

    Attributes:
        key: names the worker and its run; no two runs share one. worker: the same for people.
        at: when it was taken, seconds since 1970 on the worker's own clock.
        total_ns: how long the worker has been there; the sum of ``states_ns``.
        consumers_ns: the stages that ride the decode pass; they sum to the state ``consume``.
        state: what it is doing now.
        rss_bytes: of the worker's own process; 0 where it is a thread of the driver. child_rss_bytes: of its
            decoding child.
    """

    key: str
    worker: str
    at: float
    state: str
    total_ns: int
    states_ns: dict[str, int]
    consumers_ns: dict[str, int] = field(default_factory=dict)
    units: int = 0
    items: int = 0
    frames: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    rss_bytes: int = 0
    child_rss_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Division:
    """How the time of a state divides, as a child process tells it: nanoseconds by state, and by riding stage."""

    states_ns: Mapping[str, int]
    consumers_ns: Mapping[str, int]
    frames: int = 0


_NOTHING = Division({}, {})
_CURRENT: ContextVar[Meter | None] = ContextVar("videoflow_meter", default=None)


class Meter:
    """The clock and the counters of one worker. Its own thread drives it; `snapshot` may be asked from any thread."""

    def __init__(self, key: str, worker: str, *, resting: str = "idle", pid: int | None = None) -> None:
        self.key, self.worker = key, worker
        self.child_pid: Callable[[], int] = lambda: 0
        self._pid = pid
        self._lock = threading.Lock()
        self._stack = [resting]
        self._began_ns = self._since_ns = time.perf_counter_ns()
        self._ended_ns: int | None = None
        self._states_ns: dict[str, int] = {resting: 0}
        self._consumers_ns: dict[str, int] = {}
        self._counts = dict.fromkeys(("units", "items", "frames", "bytes_read", "bytes_written"), 0)
        self._live: tuple[str, Callable[[], Division]] | None = None

    def __repr__(self) -> str:
        return f"Meter({self.worker!r}, {self._stack[-1]})"

    # -- the worker's side -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Marked functions that this thread calls inside the block count here."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextlib.contextmanager
    def span(self, state: str) -> Iterator[None]:
        """Be in a state; the one around it stands still meanwhile."""
        self._turn(lambda: self._stack.append(state))
        try:
            yield
        finally:
            self._turn(self._stack.pop)

    @contextlib.contextmanager
    def divided(self, state: str, tell: Callable[[], Division]) -> Iterator[None]:
        """Be in a state that divides into others, as ``tell`` says at any moment and for the last time at the end."""
        with self.span(state):
            with self._lock:
                self._live = (state, tell)
            try:
                yield
            finally:
                with self._lock:
                    self._add_elapsed()
                    self._live = None
                    self._fold(state, tell())

    def count(self, **more: int) -> None:
        """Add to the counters: units, items, frames, bytes_read, bytes_written."""
        with self._lock:
            for name, value in more.items():
                self._counts[name] += value

    def end(self) -> None:
        """The worker's time ends here."""
        with self._lock:
            if self._ended_ns is None:
                self._add_elapsed()
                self._ended_ns = self._since_ns

    def _turn(self, change: Callable[[], object]) -> None:
        with self._lock:
            self._add_elapsed()
            change()

    def _add_elapsed(self) -> None:
        now = time.perf_counter_ns() if self._ended_ns is None else self._since_ns
        state = self._stack[-1]
        self._states_ns[state] = self._states_ns.get(state, 0) + now - self._since_ns
        self._since_ns = now

    def _fold(self, state: str, division: Division) -> None:
        divide(self._states_ns, state, division.states_ns)
        for name, ns in division.consumers_ns.items():
            self._consumers_ns[name] = self._consumers_ns.get(name, 0) + ns
        self._counts["frames"] += division.frames

    @property
    def num_units(self) -> int:
        """Units that have ended."""
        return self._counts["units"]

    # -- the watcher's side ------------------------------------------------------------------------------------------

    def snapshot(self) -> WorkerSnapshot:
        """Everything until now, what is going on included."""
        with self._lock:
            self._add_elapsed()
            states, consumers, counts = dict(self._states_ns), dict(self._consumers_ns), dict(self._counts)
            total, state, live = self._since_ns - self._began_ns, self._stack[-1], self._live
            division = live[1]() if live else _NOTHING
        if live:
            divide(states, live[0], division.states_ns)
        for name, ns in division.consumers_ns.items():
            consumers[name] = consumers.get(name, 0) + ns
        counts["frames"] += division.frames
        return WorkerSnapshot(
            self.key,
            self.worker,
            time.time(),
            state,
            total,
            states,
            consumers,
            **counts,
            rss_bytes=rss_bytes(self._pid) if self._pid else 0,
            child_rss_bytes=rss_bytes(self.child_pid()),
        )


def divide(states_ns: dict[str, int], state: str, parts: Mapping[str, int]) -> None:
    """Move ``parts`` out of a state into others, in order, never more than it holds: the sum stays the same."""
    for name, ns in parts.items():
        moved = max(0, min(ns, states_ns.get(state, 0)))
        if moved:
            states_ns[state] -= moved
            states_ns[name] = states_ns.get(name, 0) + moved


def rss_bytes(pid: int | None) -> int:
    """Resident memory of a process; 0 if there is none."""
    if not pid:
        return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


# -- marks at the edges of the work ----------------------------------------------------------------------------------


def current() -> Meter | None:
    """The meter of the thread that asks."""
    return _CURRENT.get()


@contextlib.contextmanager
def span(state: str) -> Iterator[None]:
    """The block means a state of whatever worker runs it."""
    meter = _CURRENT.get()
    if meter is None:
        yield
        return
    with meter.span(state):
        yield


def count(**more: int) -> None:
    """Add to the counters of whatever worker runs this."""
    meter = _CURRENT.get()
    if meter is not None:
        meter.count(**more)


def metered(state: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a function: a call of it means a state."""

    def mark(work: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(work)
        def marked(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(state):
                return work(*args, **kwargs)

        return marked

    return mark


def metered_entry(
    state: str,
) -> Callable[[Callable[P, contextlib.AbstractContextManager[T]]], Callable[P, contextlib.AbstractContextManager[T]]]:
    """Mark a function that makes a context manager: entering it means a state, the block inside does not."""

    def mark(
        make: Callable[P, contextlib.AbstractContextManager[T]],
    ) -> Callable[P, contextlib.AbstractContextManager[T]]:
        @functools.wraps(make)
        @contextlib.contextmanager
        def marked(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
            with contextlib.ExitStack() as stack:
                with span(state):
                    value = stack.enter_context(make(*args, **kwargs))
                yield value

        return marked

    return mark


def counted(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; their Arrow bytes count as written by whatever worker asked, on whatever thread they go."""
    meter = _CURRENT.get()
    return batches if meter is None else _counted(batches, meter)


def _counted(batches: Iterator[Any], meter: Meter) -> Iterator[Any]:
    for batch in batches:
        meter.count(bytes_written=batch.nbytes)
        yield batch
