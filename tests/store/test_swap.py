"""The swap is a compare-and-swap whatever happened to the table meanwhile: other swaps, compactions, deletions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lance
import pytest
from lance.fragment import FragmentMetadata

from tests.store.test_commit import FP, STAGE, committer, keys_in, target_of, write_unit
from videoflow.dataset.catalog import Catalog
from videoflow.store.layout import Root
from videoflow.store.ledger import ItemResult, Ledger
from videoflow.store.swap import TableHead
from videoflow.store.writer import Target, open_table


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Catalog.open(tmp_path / "cat", create=True).root


def add(root: Root, target: Target, head: TableHead, name: str) -> bool:
    record = write_unit(root, target, [name])
    return head.swap([FragmentMetadata.from_json(f) for f in record.fragments], [record.unit])


def opened(root: Root, target: Target) -> TableHead:
    head = TableHead(root, target.path)
    assert head.dataset is not None
    return head


def by_another(root: Root, target: Target) -> None:
    assert add(root, target, opened(root, target), "other")


def compacted(root: Root, target: Target) -> None:
    open_table(root, target.path).optimize.compact_files()


def compacted_and_by_another(root: Root, target: Target) -> None:
    compacted(root, target)
    by_another(root, target)


def by_another_and_compacted(root: Root, target: Target) -> None:
    by_another(root, target)
    compacted(root, target)


def first_deleted(root: Root, target: Target) -> None:
    open_table(root, target.path).delete("item_key = 'a'")


@pytest.mark.parametrize(
    "meanwhile", [by_another, compacted, compacted_and_by_another, by_another_and_compacted, first_deleted]
)
def test_a_stale_head_swaps_nothing(root: Root, meanwhile: Callable[[Root, Target], None]) -> None:
    target = target_of(root)
    for name in "abc":
        assert add(root, target, opened(root, target), name)
    stale = opened(root, target)
    meanwhile(root, target)
    before = keys_in(root, target)
    assert not add(root, target, stale, "mine")
    assert keys_in(root, target) == before
    assert add(root, target, stale, "mine")  # it has read the table anew
    assert keys_in(root, target) == sorted([*before, "mine"])


def test_of_two_first_swaps_one_counts(root: Root) -> None:
    target = target_of(root)
    one, two = opened(root, target), opened(root, target)
    assert add(root, target, one, "a") and not add(root, target, two, "b")
    assert keys_in(root, target) == ["a"]


def test_rows_keep_their_ids_and_their_order(root: Root) -> None:
    target = target_of(root)
    head = opened(root, target)
    for name in "abcd":
        assert add(root, target, head, name)
    table = open_table(root, target.path).to_table(columns=["item_key"], with_row_id=True)
    assert table["item_key"].to_pylist() == ["a", "b", "c", "d"] and len(set(table["_rowid"].to_pylist())) == 4
    compacted(root, target)
    assert add(root, target, opened(root, target), "e")
    later = open_table(root, target.path).to_table(columns=["item_key"], with_row_id=True)
    assert later.slice(0, 4).to_pylist() == table.to_pylist()


def test_units_are_read_once_and_asked_for_from_any_version(root: Root) -> None:
    target = target_of(root)
    head, other = opened(root, target), opened(root, target)
    versions = []
    for name in "ab":
        assert add(root, target, head, name)
        versions.append(head.dataset.version)
    units = [write_unit(root, target, [n]).unit for n in "ab"]
    late = opened(root, target)
    assert late.units_since(versions[0]) == {units[1]: versions[1]}
    assert late.units_since(target.since_version) == dict(zip(units, versions, strict=True))
    assert other.units_since(target.since_version) == {}  # it still knows the old version
    assert not head.is_own or head.units_since(target.since_version)[units[0]] == versions[0]


def test_a_commit_reads_no_transaction_twice(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = lance.LanceDataset.get_transactions

    def counted(self: lance.LanceDataset, recent: int = 10) -> object:
        asked.append(recent)
        return real(self, recent)

    monkeypatch.setattr(lance.LanceDataset, "get_transactions", counted)
    target, one = target_of(root), committer(root)
    for i in range(5):
        one.commit([write_unit(root, target, [f"k{i}"])])
    assert sum(asked) == 0
    committer(root).commit([write_unit(root, target, ["other"])])
    one.commit([write_unit(root, target, ["last"])])
    assert sum(asked) <= 5 + 1 + 1  # the other one read five, this one what the other had added


def test_an_item_of_a_unit_that_others_staged_but_did_not_swap_is_no_double(root: Root) -> None:
    target = target_of(root)
    theirs, mine = write_unit(root, target, ["a", "b"]), write_unit(root, target, ["b", "c"])
    committer(root).commit([mine])
    assert keys_in(root, target) == ["b", "c"]
    committer(root).commit([theirs])  # its turn comes, and it holds what is there already
    assert keys_in(root, target) == ["b", "c"] and "a" not in Ledger(root).states(STAGE, FP)


def test_a_retried_unit_is_committed_again(root: Root) -> None:
    target = target_of(root)
    bad = ItemResult("a", "a", "d", state="quarantined", reason="timeout")
    Ledger(root).append([(STAGE, FP, "x", bad)], job="j")
    committer(root).commit([write_unit(root, target, ["a"])])
    assert keys_in(root, target) == ["a"] and Ledger(root).states(STAGE, FP)["a"].state == "done"
