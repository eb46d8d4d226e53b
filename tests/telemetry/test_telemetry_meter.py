"""A worker's clock: parts sum to the whole whatever happens, and marks cost nothing where nobody watches."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoflow.telemetry.meter import (
    GROUP_OF,
    STATES,
    Division,
    Meter,
    count,
    counted,
    current,
    divide,
    metered,
    metered_entry,
)
from workers.child_meter import ChildMeter, PassClock


def test_states_exclude_each_other_and_sum_to_the_whole() -> None:
    meter = Meter("k", "w")
    with meter.span("other"):
        with meter.span("read"):
            time.sleep(0.02)
        with contextlib.suppress(ValueError), meter.span("write"):
            raise ValueError
        middle = meter.snapshot()
    meter.end()
    w = meter.snapshot()
    assert middle.state == "other" and w.state == "idle"
    for s in (middle, w):
        assert sum(s.states_ns.values()) == s.total_ns
    assert w.states_ns["read"] >= 20_000_000
    assert set(w.states_ns) == {"idle", "other", "read", "write"}
    assert meter.snapshot().total_ns == w.total_ns  # its time has ended


def test_marks_count_for_the_bound_meter_of_their_thread_only() -> None:
    @metered("read")
    def work() -> Meter | None:
        count(bytes_read=5)
        return current()

    assert work() is None
    meter = Meter("k", "w")
    elsewhere: list[Meter | None] = []
    with meter.bound():
        assert work() is meter
        thread = threading.Thread(target=lambda: elsewhere.append(work()))
        thread.start()
        thread.join()
    assert elsewhere == [None] and current() is None
    assert meter.snapshot().bytes_read == 5 and "read" in meter.snapshot().states_ns


def test_only_the_entry_of_a_context_manager_is_marked() -> None:
    left: list[str] = []

    @metered_entry("fetch")
    @contextlib.contextmanager
    def fetched(name: str) -> Iterator[str]:
        time.sleep(0.02)
        try:
            yield name
        except KeyError:
            left.append("error")
        finally:
            left.append(name)

    meter = Meter("k", "w")
    with meter.bound(), meter.span("other"), fetched("a") as name:
        assert name == "a"
        time.sleep(0.03)
        raise KeyError
    w = meter.snapshot()
    assert left == ["error", "a"]
    assert w.states_ns["fetch"] >= 20_000_000 and w.states_ns["other"] >= 30_000_000


def test_bytes_count_on_whatever_thread_the_batches_go() -> None:
    class Batch:
        nbytes = 7

    meter = Meter("k", "w")
    with meter.bound():
        batches = counted(iter([Batch(), Batch()]))
    thread = threading.Thread(target=lambda: list(batches))
    thread.start()
    thread.join()
    assert meter.snapshot().bytes_written == 14


@given(st.integers(0, 10**9), st.dictionaries(st.sampled_from(STATES), st.integers(-5, 10**9)))
def test_dividing_a_state_moves_time_and_makes_none(held: int, parts: dict[str, int]) -> None:
    parts.pop("decode", None)
    states = {"decode": held, "idle": 3}
    divide(states, "decode", parts)
    assert sum(states.values()) == held + 3 and min(states.values()) >= 0


def test_a_divided_state_is_seen_while_it_lasts_and_kept_afterwards() -> None:
    meter = Meter("k", "w")
    told = {"frames": 10, "ns": 1_000_000}
    with meter.divided("decode", lambda: Division({"consume": told["ns"]}, {"shots": told["ns"]}, told["frames"])):
        time.sleep(0.02)
        live = meter.snapshot()
        told.update(frames=30, ns=5_000_000)
    with meter.divided("decode", lambda: Division({"consume": 2_000_000}, {"shots": 2_000_000}, 4)):
        time.sleep(0.005)
    w = meter.snapshot()
    assert (live.frames, live.states_ns["consume"], live.consumers_ns) == (10, 1_000_000, {"shots": 1_000_000})
    assert (w.frames, w.states_ns["consume"], w.consumers_ns) == (34, 7_000_000, {"shots": 7_000_000})
    assert sum(w.states_ns.values()) == w.total_ns and sum(live.states_ns.values()) == live.total_ns


class Rider:
    """What is asked of a consumer in the pass."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds, self.seen = name, seconds, 0

    def begin(self, video: object) -> None: ...

    def see(self, frame: object) -> Iterator[dict[str, int]]:
        time.sleep(self.seconds)
        self.seen += 1
        yield {"n": self.seen}

    def finish(self, summary: object) -> str:
        return "product"


def test_a_child_tells_riders_frames_and_rows_apart() -> None:
    parent = ChildMeter(multiprocessing.get_context("spawn"))
    clock = PassClock(parent.shared)
    rows: list[tuple[str, dict[str, int]]] = []
    sink = clock.sink(lambda stage, row: rows.append((stage, row)))
    fast, slow, last = (Rider("fast", 0), Rider("slow", 0.004), Rider("heartbeat", 0))
    meter = Meter("k", "w")
    with meter.bound(), parent.decoding(["fast", "slow"]):
        time.sleep(0.03)  # a process starts
        with clock.passing():
            riders = clock.ride([fast, slow, last])  # type: ignore[list-item]
            for _ in range(10):
                for r in riders:
                    for row in r.see(None):  # type: ignore[arg-type, union-attr]
                        sink(r.name, row)
            assert [r.finish(None) for r in riders] == ["product"] * 3  # type: ignore[arg-type, comparison-overlap]
    w = meter.snapshot()
    assert [r.name for r in riders] == ["fast", "slow", "heartbeat"] and len(rows) == 30
    assert w.frames == 10 and w.consumers_ns["slow"] >= 40_000_000
    assert w.states_ns["start_up"] >= 30_000_000
    assert sum(w.states_ns.values()) == w.total_ns
    assert w.states_ns["consume"] == sum(w.consumers_ns.values())
    assert "write" in w.states_ns and "heartbeat" not in w.consumers_ns
    with parent.decoding(["fast"]):  # nobody watches: no harm
        pass


def test_every_state_counts_as_something() -> None:
    assert len(STATES) == len(set(STATES)) and set(GROUP_OF.values()) == {
        "busy",
        "idle",
        "starting",
        "blocked_on_input",
        "blocked_on_output",
    }


@pytest.mark.parametrize("pid", [0, None, 2**22 + 1])
def test_a_process_that_is_gone_holds_nothing(pid: int | None) -> None:
    meter = Meter("k", "w", pid=pid)
    meter.child_pid = lambda: pid or 0
    assert (meter.snapshot().rss_bytes, meter.snapshot().child_rss_bytes) == (0, 0)
