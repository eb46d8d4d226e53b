"""The local engine: the same stages as the cluster's, in one process tree without Ray.

Worker threads each run whole units; what may hang or crash (decoding) happens in each worker's sandbox child.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence

from videoflow.unit import Unit, UnitReport
from workers.run_unit import Cancelled, UnitRunner


class LocalEngine:
    """Runs units on ``workers`` threads, one a core unless told. ``memory_bytes``: what one decoding child may take."""

    def __init__(self, *, workers: int | None, memory_bytes: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1
        self._memory = memory_bytes
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._runners: list[UnitRunner] = []

    def run(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        """Reports as units end; the first failure of a worker is raised after the others have stopped."""
        todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        for unit in units:
            todo.put(unit)
        ended: queue.SimpleQueue[UnitReport | BaseException | None] = queue.SimpleQueue()
        count = min(self.workers, len(units))
        self._stop.clear()
        self._threads = [threading.Thread(target=self._work, args=(todo, ended), daemon=True) for _ in range(count)]
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
                yield report
        self._join()
        self._runners = []

    def _work(self, todo: queue.SimpleQueue[Unit], ended: queue.SimpleQueue[UnitReport | BaseException | None]) -> None:
        runner = UnitRunner(memory_bytes=self._memory)
        self._runners.append(runner)
        try:
            while not self._stop.is_set():
                try:
                    unit = todo.get_nowait()
                except queue.Empty:
                    return
                ended.put(runner.run(unit))
        except Cancelled:
            return
        except BaseException as e:
            ended.put(e)
        finally:
            runner.close()
            ended.put(None)

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
