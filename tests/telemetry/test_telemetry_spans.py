"""The ring keeps the last spans, whoever writes."""

from __future__ import annotations

import threading

import pytest

from videoflow.telemetry.spans import Span, SpanRing


def test_spans_of_a_batch_by_start() -> None:
    ring = SpanRing()
    ring.record(1, "decode", 30, 40)
    ring.record(2, "read", 5, 9)
    ring.record(1, "read", 10, 20)
    assert ring.of_batch(1) == [Span(1, "read", 10, 20), Span(1, "decode", 30, 40)]
    assert ring.of_batch(3) == []


def test_old_spans_are_overwritten_and_counted() -> None:
    ring = SpanRing(capacity=4)
    for i in range(6):
        ring.record(i, "plan", i, i + 1)
    spans, num_lost = ring.drain()
    assert [s.batch for s in spans] == [2, 3, 4, 5]
    assert num_lost == 2
    assert ring.drain() == ([], 0)
    ring.record(6, "copy", 6, 7)
    assert ring.drain() == ([Span(6, "copy", 6, 7)], 0)


def test_a_span_is_recorded_when_its_work_raises() -> None:
    ring = SpanRing()
    with pytest.raises(ValueError), ring.span(0, "decode"):
        raise ValueError
    (span,) = ring.of_batch(0)
    assert span.end_ns >= span.start_ns


def test_unknown_stages_are_errors() -> None:
    with pytest.raises(KeyError):
        SpanRing().record(0, "thinking", 0, 1)


def test_many_threads_lose_nothing() -> None:
    ring = SpanRing(capacity=4000)

    def write(batch: int) -> None:
        for i in range(500):
            ring.record(batch, "read", i, i + 1)

    threads = [threading.Thread(target=write, args=(b,)) for b in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([s.start_ns for s in ring.of_batch(b)] == list(range(500)) for b in range(8))
