"""Reading ahead: a batch goes through named steps on two threads, in order, through bounded queues, wrapped in spans.

The first thread plans and reads (it waits for storage), the second decodes, copies and transforms (it waits for CPUs or
a GPU). The steps are plain functions and know neither threads nor telemetry. What a step raises travels to the consumer
in the batch's place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from videoflow.telemetry.spans import SpanRing

Step = tuple[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Made:
    """One batch on its way: ``number`` in the ring, what it was ordered as, what it is by now."""

    number: int
    order: Any
    value: Any
    ready_ns: int
    error: BaseException | None = None


class Channel:
    """A bounded first-in first-out queue that can be closed from either side: then ``put`` gives False and ``get``
    None.
    """

    def __init__(self, capacity: int) -> None:
        self._items: deque[Made] = deque()
        self._capacity = capacity
        self._closed = False
        self._ended = False
        self._changed = threading.Condition()

    def put(self, item: Made) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Made | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or bool(self._items))
            if self._closed or not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def end(self) -> None:
        """Nothing more will be put; what is inside can still be got."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what is inside and wake everybody."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class ReadAhead:
    """Runs batches through steps ahead of the consumer.

    Args:
        orders: what to make, in order; may be endless. Taken on the first thread.
        first, second: (stage name, function) pairs of the two threads.
        prefetch: finished batches that may wait for the consumer; each thread works on one more, and one lies between
            them.
        ring: takes the spans.
        first_number: number of the first batch in the ring.
    """

    def __init__(
        self,
        orders: Iterable[Any],
        *,
        first: Sequence[Step],
        second: Sequence[Step],
        prefetch: int,
        ring: SpanRing,
        first_number: int,
    ) -> None:
        self._between = Channel(1)
        self._out = Channel(prefetch)
        self._ring = ring
        self._threads = [
            threading.Thread(
                target=self._run_first, args=(orders, first, first_number), name="videoflow-read", daemon=True
            ),
            threading.Thread(target=self._run_second, args=(second,), name="videoflow-make", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def get(self) -> Made | None:
        """The next batch in order (its ``error`` is set if a step raised), None at the end or after ``stop``."""
        return self._out.get()

    def stop(self) -> None:
        """End the threads, dropping what they were making. Waits for a step that is under way."""
        self._between.close()
        self._out.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def _run_first(self, orders: Iterable[Any], steps: Sequence[Step], number: int) -> None:
        try:
            for order in orders:
                item = self._work(Made(number, order, order, 0), steps)
                if not self._between.put(item) or item.error is not None:
                    break
                number += 1
        except BaseException as e:  # the orders themselves failed
            self._between.put(Made(number, None, None, 0, e))
        self._between.end()

    def _run_second(self, steps: Sequence[Step]) -> None:
        while (item := self._between.get()) is not None:
            if item.error is None:
                self._ring.record(item.number, "queue", item.ready_ns, time.perf_counter_ns())
                item = self._work(item, steps)
            if not self._out.put(item) or item.error is not None:
                break
        self._out.end()

    def _work(self, item: Made, steps: Sequence[Step]) -> Made:
        value = item.value
        try:
            for stage, function in steps:
                with self._ring.span(item.number, stage):
                    value = function(value)
        except BaseException as e:  # whatever it is belongs to the consumer, not to a thread's stderr
            return Made(item.number, item.order, None, time.perf_counter_ns(), e)
        return Made(item.number, item.order, value, time.perf_counter_ns())
