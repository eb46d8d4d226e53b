"""Answers as columns say what the ledger's rows say: newest wins, retries are none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from videoflow.dataset.catalog import Catalog
from videoflow.store.layout import LEDGER
from videoflow.store.ledger import KEYS_AT_ONCE, ItemResult, Ledger
from videoflow.store.states import COLUMNS, NOWHERE, States, newest
from videoflow.store.writer import open_table

FP = "f" * 32
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Catalog.open(tmp_path / "cat", create=True).ledger


def put(ledger: Ledger, *results: ItemResult, unit: str = "u") -> None:
    ledger.append([("s", FP, unit, r) for r in results], job="j")


def item(key: str, state: str = "done", rows: int = 1) -> ItemResult:
    return ItemResult(key, f"v{key}", "in", f"out-{key}-{state}", rows, state)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4), st.sampled_from("xyz")), max_size=30))
def test_newest_is_what_reading_row_by_row_would_keep(rows: list[tuple[str, int, str]]) -> None:
    kept: dict[tuple[str, str], tuple[int, int]] = {}
    for n, (key, at, other) in enumerate(rows):
        if (key, other) not in kept or kept[key, other][0] <= at:
            kept[key, other] = (at, n)
    columns = {
        "key": [r[0] for r in rows],
        "other": [r[2] for r in rows],
        "at": [BEGIN + timedelta(seconds=r[1]) for r in rows],
        "n": list(range(len(rows))),
    }
    kinds = pa.schema(
        [("key", pa.string()), ("other", pa.string()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]
    )
    found = newest(pa.table(columns, kinds), ["key", "other"])
    assert found["n"].to_pylist() == sorted(n for _, n in kept.values())


def test_the_newest_answer_wins_and_one_to_be_retried_is_none(ledger: Ledger) -> None:
    put(ledger, item("a", "quarantined", 0), item("b"), item("c", "quarantined", 0))
    put(ledger, item("a"), item("c", "retry", 0))
    states = ledger.states("s", FP)
    assert {k: (r.state, r.rows, r.video_key) for k, r in states.items()} == {
        "a": ("done", 1, "va"),
        "b": ("done", 1, "vb"),
    }
    assert ledger.states("s", "0" * 32) == {} and ledger.states("other", FP) == {}


def test_many_are_found_at_once(ledger: Ledger) -> None:
    put(ledger, item("a"), item("b", "filtered", 0), item("c", "quarantined", 0))
    states = ledger.states("s", FP)
    found = states.find(["c", "none", "a", "b", "a"])
    assert found[1] == NOWHERE and found[2] == found[4] and len(set(found.tolist())) == 4
    assert states.is_state("quarantined")[found].tolist() == [True, False, False, False, False]
    assert states.has_rows()[found].tolist() == [False, False, True, False, True]
    assert states.taken(found, "output_digest").to_pylist()[:3] == ["out-c-quarantined", None, "out-a-done"]
    assert [r.item_key for r in states.rows(found[[0, 2]])] == ["c", "a"]


def test_of_no_answers_nothing_is_found(ledger: Ledger) -> None:
    states = ledger.states("s", FP)
    assert states.find(["a", "b"]).tolist() == [NOWHERE, NOWHERE]
    assert not states.is_state("done")[states.find(["a"])].any()
    assert states.taken(states.find(["a"]), "output_digest").to_pylist() == [None]
    assert States(pa.table({c: pa.array([], pa.string()) for c in COLUMNS})).find([]).tolist() == []


@pytest.mark.parametrize("count", [0, 2, KEYS_AT_ONCE + 1])
def test_some_can_be_asked_for(ledger: Ledger, count: int) -> None:
    put(ledger, *(item(f"{i:05d}") for i in range(count + 3)))
    put(ledger, item("00000", "retry", 0))
    wanted = [f"{i:05d}" for i in range(count)]
    assert set(ledger.states("s", FP, among=wanted)) == set(wanted[1:])


def test_answers_of_many_stages_in_one_reading_are_those_of_each(ledger: Ledger) -> None:
    """Also where rows of several stages stand in one append, as after a tidy or a quarantined probe."""
    pairs = [("s", FP), ("s", "0" * 32), ("t", FP), ("none", FP)]
    mixed = [
        (*pairs[n % 3], "u", item(f"{n % 7}", ("done", "filtered", "quarantined", "retry")[n % 4])) for n in range(40)
    ]
    ledger.append(mixed, job="j")
    put(ledger, item("0", "quarantined", 0), item("8"), item("9", "retry", 0))
    ledger.append(mixed[5:9], job="j")
    lean = ledger.lean_states(pairs)
    assert set(lean) == set(pairs) and len(lean["s", FP]) > 3
    for pair in pairs:
        whole = ledger.states(*pair)
        keys = [*map(str, range(10)), "none"]
        at, expected = lean[pair].find(keys), [whole.get(k) for k in keys]
        assert (at != NOWHERE).tolist() == [r is not None for r in expected], pair
        assert lean[pair].taken(at, "output_digest").to_pylist() == [r.output_digest if r else None for r in expected]
        for state in ("done", "filtered", "quarantined", "retry"):
            assert lean[pair].is_state(state)[at].tolist() == [bool(r and r.state == state) for r in expected]
        assert lean[pair].has_rows()[at].tolist() == [bool(r and r.rows) for r in expected]


def test_a_tidied_ledger_says_the_same_and_can_be_appended_to_meanwhile(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("videoflow.store.ledger.MAX_LEDGER_FRAGMENTS", 3)
    put(ledger, item("a", "quarantined", 0), item("a"))  # of one moment: the later row counts
    put(ledger, item("b", "quarantined", 0))
    put(ledger, item("b"), item("c"))
    ledger.tidy()
    assert len(open_table(ledger._root, LEDGER).get_fragments()) == 3
    put(ledger, item("c", "retry", 0))
    before, units = dict(ledger.states("s", FP)), ledger.units("s", FP)
    stale = open_table(ledger._root, LEDGER)
    ledger.tidy()
    assert len(open_table(ledger._root, LEDGER).get_fragments()) == 1
    lance.write_dataset(stale.take([1]), stale, mode="append")  # an append that began before
    assert dict(ledger.states("s", FP)) == before and ledger.units("s", FP) == units and set(before) == {"a", "b"}


def test_a_unit_with_an_item_to_be_retried_is_not_committed(ledger: Ledger) -> None:
    put(ledger, item("a"), unit="one")
    put(ledger, item("b", "quarantined", 0), unit="two")
    assert ledger.units("s", FP) == {"one", "two"}
    put(ledger, item("b", "retry", 0), unit="")
    assert ledger.units("s", FP) == {"one"}
    put(ledger, item("b"), unit="two")
    assert ledger.units("s", FP) == {"one", "two"}
