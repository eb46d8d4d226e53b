"""The local engine: the same stages as the cluster's, in one process tree without Ray.

Worker threads each run whole units; what may hang or crash (decoding) happens in each worker's sandbox child.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
from collections.abc import Iterator

from videoflow.telemetry.meter import Meter, WorkerSnapshot
from videoflow.unit import Unit, UnitReport, Units
from workers.run_unit import Cancelled, UnitRunner
from workers.watched import run_watched

#: Finished units that may wait for the driver, a worker: then workers wait too, and memory stays flat.
HAND_OVER_PER_WORKER = 2
STOP_POLL_SECONDS = 0.1


class _Todo:
    """Units that nobody has begun; any thread may take the next one."""

    def __init__(self, units: Units) -> None:
        self._units = iter(units)
        self._lock = threading.Lock()

    def take(self) -> Unit | None:
        """The next unit, None if there is none."""
        with self._lock:
            return next(self._units, None)


class LocalEngine:
    """Runs units on ``workers`` threads, one a core unless told. ``memory_bytes``: what one decoding child may take."""

    def __init__(self, *, workers: int | None, memory_bytes: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1
        self._memory = memory_bytes
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._runners: list[UnitRunner] = []
        self._meters: list[Meter] = []
        self._given = 0

    def run(self, units: Units) -> Iterator[UnitReport]:
        """Reports as units end; the first failure of a worker is raised after the others have stopped."""
        todo = _Todo(units)
        count = min(self.workers, len(units))
        ended: queue.Queue[UnitReport | BaseException | None] = queue.Queue(HAND_OVER_PER_WORKER * count)
        self._stop.clear()
        self._given = 0
        self._meters = self._new_meters(count)
        work = [(todo, ended, meter) for meter in self._meters]
        self._threads = [threading.Thread(target=self._work, args=args, daemon=True) for args in work]
        for thread in self._threads:
            thread.start()
        running = count
        while running:
            report = ended.get()
            if report is None:
                running -= 1
            elif isinstance(report, BaseException):
                self.close()
                raise report
            else:
                self._given += 1
                yield report
        self._join()
        self._runners = []
        for meter in self._meters:
            meter.end()

    def _new_meters(self, count: int) -> list[Meter]:
        run, here = secrets.token_hex(4), f"{socket.gethostname()}:{os.getpid()}"
        return [Meter(f"{run}/{i}", f"{here}/{i}") for i in range(count)]

    def watch(self) -> list[WorkerSnapshot]:
        """How the workers are now."""
        return [meter.snapshot() for meter in self._meters]

    def waiting(self) -> int:
        """Finished units that nobody has taken yet."""
        return sum(meter.num_units for meter in self._meters) - self._given

    def _work(self, todo: _Todo, ended: queue.Queue[UnitReport | BaseException | None], meter: Meter) -> None:
        runner = UnitRunner(memory_bytes=self._memory)
        self._runners.append(runner)
        try:
            while not self._stop.is_set():
                unit = todo.take()
                if unit is None:
                    return
                report = run_watched(runner, unit, meter)
                with meter.span("hand_over"):
                    self._hand_over(ended, report)
        except Cancelled:
            return
        except BaseException as e:
            self._hand_over(ended, e)
        finally:
            with meter.span("start_up"):  # and its end
                runner.close()
            self._hand_over(ended, None)

    def _hand_over(
        self, ended: queue.Queue[UnitReport | BaseException | None], what: UnitReport | BaseException | None
    ) -> None:
        """Put it where the driver takes it; after a stop nobody does, and what is staged stays."""
        while not self._stop.is_set():
            try:
                ended.put(what, timeout=STOP_POLL_SECONDS)
            except queue.Full:
                continue
            return

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []

    def close(self) -> None:
        """Workers stop after the item in hand; decoding children are killed."""
        self._stop.set()
        for runner in self._runners:
            runner.cancel()
        self._join()
