"""The Ray engine, watched: what goes through Ray's object store while a job runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import ray
from ray._private.internal_api import node_stats

from videoflow.unit import Unit, UnitReport
from workers.ray_engine import RayEngine

EVERY_SECONDS = 0.05


class WatchedRayEngine(RayEngine):
    """Asks the raylet itself, of one job at a time. ``created_bytes``: all that the job put into the store, which no
    sample can miss; ``peak_bytes``: the most that a sample has seen there at once.
    """

    peak_bytes: ClassVar[int] = 0
    created_bytes: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._before = _stats().cumulative_created_bytes
        WatchedRayEngine.peak_bytes = WatchedRayEngine.created_bytes = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def run(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        yield from super().run(units)
        self._sample()

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()
        super().close()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            with contextlib.suppress(Exception):  # the raylet is busy: the next sample, or the last, has its sum
                self._sample()

    def _sample(self) -> None:
        stats, mine = _stats(), WatchedRayEngine
        mine.peak_bytes = max(mine.peak_bytes, stats.object_store_bytes_used)
        mine.created_bytes = max(mine.created_bytes, stats.cumulative_created_bytes - self._before)


@contextlib.contextmanager
def one_ray(*, workers: int) -> Iterator[None]:
    """A Ray of this process that several jobs use, with an object store as large as the engine's own."""
    engine = RayEngine(workers=workers)
    try:
        yield
    finally:
        engine.close()


def _stats() -> Any:
    (node,) = ray.nodes()
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
