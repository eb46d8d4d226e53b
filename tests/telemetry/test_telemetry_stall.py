"""Every nanosecond of a wait is given to one stage, and the verdict says the right thing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoflow.telemetry.spans import STAGES, Span, SpanRing
from videoflow.telemetry.stall import REMEDIES, WAITS, StallMeter, StallReport, attribute_wait

PATH = [
    Span(0, "plan", 0, 10),
    Span(0, "read", 10, 50),
    Span(0, "queue", 50, 60),
    Span(0, "decode", 60, 90),
    Span(0, "copy", 90, 92),
    Span(0, "transform", 95, 100),
]


def test_a_wait_over_the_whole_path() -> None:
    parts = attribute_wait(-5, 103, PATH)
    assert parts == {"plan": 10, "read": 40, "queue": 10 + 5 + 3 + 3, "decode": 30, "copy": 2, "transform": 5}


def test_only_the_time_of_the_wait_counts() -> None:
    assert attribute_wait(80, 100, PATH) == {"plan": 0, "read": 0, "queue": 3, "decode": 10, "copy": 2, "transform": 5}


def test_a_batch_that_lay_ready() -> None:
    assert attribute_wait(120, 121, PATH) == {**dict.fromkeys(STAGES, 0), "queue": 1}


span = st.builds(
    lambda stage, start, length: Span(0, stage, start, start + length),
    st.sampled_from(STAGES),
    st.integers(-50, 200),
    st.integers(0, 80),
)


@given(st.lists(span, max_size=12), st.integers(-100, 200), st.integers(0, 300))
def test_parts_sum_to_the_whole(spans: list[Span], start_ns: int, length: int) -> None:
    parts = attribute_wait(start_ns, start_ns + length, spans)
    assert sum(parts.values()) == length
    assert min(parts.values()) >= 0


def report(**steady: int) -> StallReport:
    waits = {kind: dict.fromkeys(STAGES, 0) for kind in WAITS}
    waits["steady"].update(steady)
    waits["first_batch"]["read"] = 10**9
    return StallReport(num_batches=10, wall_ns=11 * 10**9, set_up_ns=5, waits=waits)


@pytest.mark.parametrize("stage", STAGES)
def test_the_verdict_names_the_main_cause_and_a_remedy(stage: str) -> None:
    made = report(**{"queue": 10**8, "read": 10**8, stage: 2 * 10**9})
    assert made.main_cause == stage
    assert REMEDIES[stage] in made.verdict
    assert made.stall_share == made.stall_ns / 10**10  # the first batch is no stall
    assert "first batch 1.000 s (read 1.000)" in str(made)


def test_little_stall_is_fine() -> None:
    assert "keeps up" in report(read=10**7).verdict
    assert report().main_cause is None


def test_too_early() -> None:
    assert "Too early" in StallMeter(SpanRing()).report().verdict


def test_the_meter_adds_up() -> None:
    ring = SpanRing()
    meter = StallMeter(ring, set_up_ns=7)
    for number in range(3):
        for s in PATH:
            ring.record(number, s.stage, s.start_ns + 200 * number, s.end_ns + 200 * number)
    meter.delivered(0, "first_batch", 0, 100)
    meter.delivered(1, "steady", 260, 300)
    meter.delivered(2, "epoch_turn", 490, 500)
    made = meter.report()
    assert (made.wall_ns, made.stall_ns, made.set_up_ns) == (500, 50, 7)
    assert {k: made.wait_ns(k) for k in WAITS} == {"first_batch": 100, "epoch_turn": 10, "steady": 40}
    assert made.waits["steady"]["decode"] == 30
    assert json.loads(json.dumps(made.to_dict()))["waits_ns"]["epoch_turn"]["transform"] == 5
