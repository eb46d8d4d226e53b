"""Spans at our own stage edges, in a ring that is allocated once: what each batch was in, from when to when.

Writing costs a lock and one row of a numpy array (about 2 µs a span, some six spans a batch); nothing on the hot path
allocates, formats or talks to anybody. Only host time is seen here; GPU events around the hand-over belong to a later
issue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

#: Stages in the order a batch goes through them. ``queue``: a batch lay ready and waited for the next stage.
STAGES = ("plan", "read", "queue", "decode", "copy", "transform")
_CODES = {name: code for code, name in enumerate(STAGES)}


class Span(NamedTuple):
    """One batch in one stage, [start_ns, end_ns) of ``time.perf_counter_ns``."""

    batch: int
    stage: str
    start_ns: int
    end_ns: int


class SpanRing:
    """The last ``capacity`` spans. Safe to use from several threads."""

    def __init__(self, capacity: int = 4096) -> None:
        self._rows = np.zeros(
            capacity, dtype=[("batch", "<i8"), ("stage", "u1"), ("start_ns", "<i8"), ("end_ns", "<i8")]
        )
        self._rows["batch"] = -1
        self._capacity = capacity
        self._num_written = 0
        self._num_drained = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SpanRing(capacity={self._capacity}, written={self._num_written})"

    def record(self, batch: int, stage: str, start_ns: int, end_ns: int) -> None:
        """Note that a batch was in a stage.

        Raises:
            KeyError: no such stage.
        """
        row = (batch, _CODES[stage], start_ns, end_ns)
        with self._lock:
            self._rows[self._num_written % self._capacity] = row
            self._num_written += 1

    @contextmanager
    def span(self, batch: int, stage: str) -> Iterator[None]:
        """Record the time inside the block, also if it raises."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(batch, stage, start_ns, time.perf_counter_ns())

    def of_batch(self, batch: int) -> list[Span]:
        """The spans of a batch that are still in the ring, by start."""
        with self._lock:
            rows = self._rows[self._rows["batch"] == batch]
        return sorted((_span(row) for row in rows), key=lambda s: s.start_ns)

    def drain(self) -> tuple[list[Span], int]:
        """(spans written since the last drain, oldest first; how many of them were overwritten before)."""
        with self._lock:
            first = max(self._num_drained, self._num_written - self._capacity)
            num_lost = first - self._num_drained
            rows = self._rows[np.arange(first, self._num_written) % self._capacity]
            self._num_drained = self._num_written
        return [_span(row) for row in rows], num_lost


def _span(row: np.void) -> Span:
    batch, stage, start_ns, end_ns = row.item()
    return Span(batch, STAGES[stage], start_ns, end_ns)
