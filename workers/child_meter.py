"""What goes on inside a decoding child, told to its parent through a few shared integers: no pipe, no lock, no file.

The child writes, the parent reads at any moment. Stages that ride the decode pass are wrapped one by one; the rest of
the pass is the decoder's own. Where the decoder was neither on a core nor waiting for one, it waited for bytes of its
file (or for a device): that is told by the kernel's own counts, and is left out where the kernel does not keep them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from videoflow.stage import HeardSound, PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary
from videoflow.telemetry.meter import Division, current

_BEGAN, _PASS, _SINK, _WAITED, _FRAMES, _PID, _FIRST = 0, 1, 2, 3, 4, 5, 6
#: Riding stages that are told apart; those of more than that stay in the decoder's time.
MAX_RIDERS = 26
#: On every so many frames the riders' time on a core is looked at: asking the kernel costs as much as a small rider.
SAMPLED = 7
#: How often the decoder's waiting is told: asking costs about as much as a small frame.
TELL_FRAMES, TELL_NS = 4, 500_000_000
_now = time.perf_counter_ns
_DELAYS = Path("/proc/thread-self/schedstat")  # ns on a core, ns of waiting for one, turns


class ChildMeter:
    """The parent's half. ``shared`` goes to the child."""

    def __init__(self, context: Any) -> None:
        self.shared: Any = context.RawArray("q", _FIRST + MAX_RIDERS)

    @contextlib.contextmanager
    def decoding(self, names: Sequence[str]) -> Iterator[None]:
        """One attempt at one video; ``names``: the riding stages, in the order the child has them."""
        for slot in range(len(self.shared)):
            if slot != _PID:
                self.shared[slot] = 0
        meter = current()
        if meter is None:
            yield
            return
        meter.child_pid = lambda: int(self.shared[_PID])
        began_ns = _now()
        with meter.divided("decode", lambda: self._tell(began_ns, names)):
            yield

    def _tell(self, began_ns: int, names: Sequence[str]) -> Division:
        now = _now()
        since = self.shared[_BEGAN]
        in_pass = self.shared[_PASS] or (now - since if since else 0)  # the clock is the same for all processes
        riders: dict[str, int] = {}
        for name, ns in zip(names, self.shared[_FIRST:], strict=False):
            riders[name] = riders.get(name, 0) + ns
        states = {
            "start_up": max(0, now - began_ns - in_pass),
            "consume": sum(riders.values()),
            "write": self.shared[_SINK],
            "fetch": self.shared[_WAITED],
        }
        return Division(states, {k: ns for k, ns in riders.items() if ns}, self.shared[_FRAMES])


class PassClock:
    """The child's half, for one pass after the other: wraps the pass, its riders and its sink."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self._sampled_ns = self._sampled_cpu_ns = self._told_ns = self._frames = 0
        shared[_PID] = os.getpid()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """The pass itself, from opening the file to the last row."""
        began_ns = self._told_ns = _now()
        self._cpu_ns, self._delayed_ns = time.process_time_ns(), _delayed_ns()
        self.shared[_BEGAN] = self._began_ns = began_ns
        self._sampled_ns = self._sampled_cpu_ns = self._frames = 0
        try:
            yield
        finally:
            self._tell_waited()
            self.shared[_PASS] = _now() - began_ns

    def ride(self, consumers: Sequence[PassConsumer]) -> list[PassConsumer]:
        """The same consumers, timed; the last of them, which must not fail, also counts the frames."""
        *others, last = consumers
        timed = [cast(PassConsumer, _Rider(c, self, _FIRST + i)) for i, c in enumerate(others[: MAX_RIDERS - 1])]
        counting = _Rider(last, self, _FIRST + len(timed), counts=True)
        return [*timed, *others[MAX_RIDERS - 1 :], cast(PassConsumer, counting)]

    def sink(self, sink: Callable[[str, dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
        """The same sink, timed."""

        def timed(stage: str, row: dict[str, Any]) -> None:
            began_ns = _now()
            sink(stage, row)
            self.shared[_SINK] += _now() - began_ns

        return timed

    def frame(self) -> None:
        """Another frame is shown."""
        self._frames += 1
        self.shared[_FRAMES] = self._frames
        if self._frames % TELL_FRAMES == 0 and _now() - self._told_ns > TELL_NS:
            self._tell_waited()

    def sampled(self, ns: int, cpu_ns: int) -> None:
        """One rider's call, by the wall and on a core."""
        self._sampled_ns += ns
        self._sampled_cpu_ns += min(cpu_ns, ns)

    def _tell_waited(self) -> None:
        """The decoder's time off the cores: what is left of the pass without what ran, what waited for a core, and what
        the riders spent off a core (as far as the sampled calls say).
        """
        now = self._told_ns = _now()
        delayed_ns = _delayed_ns()
        if self._delayed_ns is None or delayed_ns is None:
            return
        riders_ns = sum(self.shared[_FIRST:])
        off_core = 1 - self._sampled_cpu_ns / self._sampled_ns if self._sampled_ns else 0.0
        ran_ns = time.process_time_ns() - self._cpu_ns
        waited = now - self._began_ns - ran_ns - (delayed_ns - self._delayed_ns) - int(riders_ns * off_core)
        own_ns = now - self._began_ns - riders_ns - self.shared[_SINK]
        self.shared[_WAITED] = max(0, min(waited, own_ns))


class _Rider:
    """A consumer that is timed; whatever else is asked of it, the consumer itself answers. Written for speed: there are
    a few of these, and a frame may take no more than a fraction of a millisecond.
    """

    def __init__(self, inner: PassConsumer, clock: PassClock, slot: int, *, counts: bool = False) -> None:
        self._inner, self._clock, self._counts = inner, clock, counts
        self._see, self._shared, self._slot = inner.see, clock.shared, slot
        self._ns = self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def see(self, frame: ShownFrame) -> Sequence[dict[str, Any]]:
        """All of the frame's rows at once: a consumer may do its work while they are taken from it."""
        self._calls += 1
        if self._calls % SAMPLED == 0:
            rows = self._looked_at(frame)
        else:
            began_ns = _now()
            found = self._see(frame)
            rows = () if found is None else list(found)
            self._add(_now() - began_ns)
        if self._counts:
            self._clock.frame()
        return rows

    def _looked_at(self, frame: ShownFrame) -> Sequence[dict[str, Any]]:
        cpu_ns, began_ns = time.process_time_ns(), _now()
        rows = list(self._see(frame) or ())
        ns = _now() - began_ns
        self._clock.sampled(ns, time.process_time_ns() - cpu_ns)
        self._add(ns)
        return rows

    def hear(self, sound: HeardSound) -> Sequence[dict[str, Any]]:
        """As `see`: all of a sound's rows at once."""
        began_ns = _now()
        rows = list(self._inner.hear(sound) or ())
        self._add(_now() - began_ns)
        return rows

    def begin(self, video: VideoHeader) -> None:
        began_ns = _now()
        self._inner.begin(video)
        self._add(_now() - began_ns)

    def finish(self, summary: VideoSummary) -> Product:
        began_ns = _now()
        product = self._inner.finish(summary)
        self._add(_now() - began_ns)
        return product

    def _add(self, ns: int) -> None:
        self._ns += ns
        self._shared[self._slot] = self._ns


def _delayed_ns() -> int | None:
    """How long this thread has waited for a core; None where the kernel does not say."""
    try:
        return int(_DELAYS.read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
