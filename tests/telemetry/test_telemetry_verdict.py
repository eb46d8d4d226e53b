"""The rule of the verdict, at its edges."""

from __future__ import annotations

from typing import Any

import pytest

from videoflow.telemetry.metrics import StageFigures, Units
from videoflow.telemetry.verdict import BOTTLENECKS, judge, verdict_of


def stage(states: dict[str, float], **changes: Any) -> StageFigures:
    known: dict[str, Any] = {
        "stage": "decode",
        "counted": "videos",
        "running": False,
        "seconds": 10.0,
        "workers": 2,
        "units": Units(total=8, committed=8),
        "states": states,
        "driver": {"wait": 9.0, "commit": 0.5, "other": 0.5},
    }
    return StageFigures(**{**known, **changes})


@pytest.mark.parametrize(
    ("states", "bottleneck", "says"),
    [
        ({"decode": 12.0, "consume": 5.0, "write": 3.0}, "decode", "2 workers decoded for 85%"),
        ({"decode": 2.0, "consume": 15.0, "write": 3.0}, "decode", "stage shots, which rides the pass"),
        ({"fetch": 12.0, "decode": 8.0}, "storage_read", "bytes of the sources for 60%"),
        ({"read": 12.0, "process": 8.0}, "storage_read", "cached rows and frames"),
        ({"process": 12.0, "read": 8.0}, "model", "stage decode itself"),
        ({"unpack": 12.0, "process": 8.0}, "decode", "unpacked cached frames"),
        ({"write": 12.0, "decode": 8.0}, "storage_write", "wrote to the catalog"),
        ({"hand_over": 12.0, "decode": 8.0}, "storage_write", "hand over"),
        ({"decode": 7.0, "write": 7.0, "fetch": 6.0}, "none", "no single bottleneck (decode 35%"),
        ({"decode": 5.0, "idle": 15.0}, "too_few_units", "nothing to do for 75%"),
        ({"decode": 1.5, "idle": 15.0}, "too_short", "too short to say"),
        ({"start_up": 16.0, "decode": 3.0, "write": 1.0}, "decode", "another 80% of all their time"),
    ],
)
def test_kinds(states: dict[str, float], bottleneck: str, says: str) -> None:
    verdict = judge(stage(states, consumers={"frames": 1.0, "shots": 4.0}))
    assert verdict.bottleneck == bottleneck and bottleneck in BOTTLENECKS
    assert says in str(verdict), str(verdict)
    assert bool(verdict.remedy) == (bottleneck not in ("none", "too_short"))
    assert verdict.to_dict()["says"] == str(verdict)


def test_workers_that_tell_nothing_are_too_short_however_long_commits_took() -> None:
    driver = {"wait": 1.0, "commit": 6.0, "other": 1.0}
    verdict = judge(stage({}, driver=driver, workers=0))
    assert verdict.bottleneck == "too_short" and "0.0 s of work" in verdict.text


def test_commits_need_both_a_busy_driver_and_units_that_wait() -> None:
    states = {"decode": 6.0, "hand_over": 8.0, "idle": 6.0}
    busy = {"wait": 3.0, "commit": 6.8, "other": 0.2}
    piled = Units(total=8, committed=8, mean_waiting=2.5)
    verdict = judge(stage(states, driver=busy, units=piled))
    assert verdict.bottleneck == "commit" and verdict.share == pytest.approx(0.68)
    assert "0.85 s each" in verdict.text and "waited about 2.1 s" in verdict.text
    assert judge(stage(states, driver=busy)).bottleneck != "commit"  # nothing piles up: the workers are slower still
    assert (
        judge(stage(states, units=piled)).bottleneck != "commit"
    )  # a pile at the end, from a driver that mostly waits


def test_one_worker_never_has_too_few_units() -> None:
    states = {"decode": 5.0, "idle": 15.0}
    assert [judge(stage(states, workers=n)).bottleneck for n in (1, 2)] == ["decode", "too_few_units"]


def test_starting_is_no_part_of_the_time_that_commits_are_held_against() -> None:
    busy = {"start_up": 20.0, "wait": 4.0, "commit": 6.0}
    piled = Units(total=8, committed=8, mean_waiting=2.0)
    f = stage({"decode": 4.0, "start_up": 4.0}, seconds=30.0, driver=busy, units=piled)
    assert judge(f).bottleneck == "commit" and judge(f).share == pytest.approx(6 / 8)


def test_the_job_is_judged_by_the_stage_that_ran_longest() -> None:
    started = stage({"start_up": 100.0, "decode": 5.0}, seconds=55.0)
    ran = stage({"process": 18.0, "read": 2.0}, stage="embed", counted="clips")
    assert verdict_of([started, ran]).stage == "embed"
    assert verdict_of([]).bottleneck == "too_short"


def test_sources_are_the_drivers_own_work() -> None:
    f = stage({"fetch": 9.0}, stage="sources", counted="files", workers=1, units=Units(), driver={})
    assert judge(f).bottleneck == "storage_read"
    assert "--workers" not in str(judge(f)) and "read the sources" in str(judge(f))


def test_shares_sum_to_one_and_a_stage_without_workers_has_none() -> None:
    assert sum(stage({"decode": 1.0, "idle": 2.0, "write": 0.5, "start_up": 0.1}).shares.values()) == pytest.approx(1)
    assert set(stage({}).shares.values()) == {0.0}
