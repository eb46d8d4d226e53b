"""The commit protocol: exactly once, whoever dies when. Real Lance tables; crashes are made by stopping between
steps.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from videoflow.dataset.catalog import Catalog
from videoflow.store.commit import Committer, UnitRecord, stage_unit, unit_id
from videoflow.store.layout import Root
from videoflow.store.ledger import ItemResult, Ledger
from videoflow.store.writer import Target, ensure_target, open_table, write_rows

SCHEMA = pa.schema(
    [
        ("item_key", pa.string()),
        ("input_digest", pa.string()),
        ("video_key", pa.string()),
        ("stream", pa.int32()),
        ("n", pa.int64()),
    ]
)
STAGE, FP = "mine", "f" * 32


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Catalog.open(tmp_path / "cat", create=True).root


def target_of(root: Root) -> Target:
    return ensure_target(root, stage=STAGE, fingerprint=FP, table="mine", schema=SCHEMA)


def write_unit(root: Root, target: Target, keys: list[str]) -> UnitRecord:
    """What a worker does up to and including the staged record."""
    rows = [{"item_key": k, "input_digest": "d", "video_key": k, "stream": 0, "n": i} for i, k in enumerate(keys)]

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)

    fragments = write_rows(root, target, SCHEMA, batches, expected=len(rows))
    items = tuple(ItemResult(k, k, "d", f"out-{k}", 1) for k in keys)
    return stage_unit(root, UnitRecord(unit_id(STAGE, FP, keys), target, items, tuple(fragments), "job"))


def keys_in(root: Root, target: Target) -> list[str]:
    return sorted(open_table(root, target.path).to_table(columns=["item_key"])["item_key"].to_pylist())


def committer(root: Root) -> Committer:
    return Committer(root, Ledger(root))


def test_a_committed_unit_is_in_table_and_ledger_and_its_record_is_gone(root: Root) -> None:
    target = target_of(root)
    record = write_unit(root, target, ["a", "b"])
    assert root.has(record.path)
    committer(root).commit([record])
    assert keys_in(root, target) == ["a", "b"]
    assert {k: (r.state, r.rows) for k, r in Ledger(root).states(STAGE, FP).items()} == {
        "a": ("done", 1),
        "b": ("done", 1),
    }
    assert not root.has(record.path)


def test_committing_the_same_unit_again_changes_nothing(root: Root) -> None:
    target = target_of(root)
    record = write_unit(root, target, ["a"])
    committer(root).commit([record])
    version = open_table(root, target.path).version
    committer(root).commit([record])
    assert keys_in(root, target) == ["a"]
    assert open_table(root, target.path).version == version


def test_death_after_staging_is_recovered_by_anyone(root: Root) -> None:
    target = target_of(root)
    write_unit(root, target, ["a"])
    assert committer(root).recover(STAGE, FP) == 1
    assert keys_in(root, target) == ["a"]
    assert committer(root).recover(STAGE, FP) == 0


def test_death_between_commit_and_ledger_doubles_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(root)
    record = write_unit(root, target, ["a"])

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "append", die)
    with pytest.raises(KeyboardInterrupt):
        committer(root).commit([record])
    monkeypatch.undo()
    assert Ledger(root).states(STAGE, FP) == {}
    committer(root).recover(STAGE, FP)
    assert keys_in(root, target) == ["a"]
    assert set(Ledger(root).states(STAGE, FP)) == {"a"}


def test_death_between_ledger_and_removal_doubles_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(root)
    record = write_unit(root, target, ["a"])

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Root, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        committer(root).commit([record])
    monkeypatch.undo()
    committer(root).recover(STAGE, FP)
    assert keys_in(root, target) == ["a"]
    assert not root.has(record.path)


def test_the_first_writer_of_a_unit_wins(root: Root) -> None:
    target = target_of(root)
    first = write_unit(root, target, ["a"])
    second = write_unit(root, target, ["a"])
    assert second.nonce == first.nonce
    committer(root).commit([second])
    assert keys_in(root, target) == ["a"]


def test_a_unit_that_overlaps_a_committed_one_is_left_out(root: Root) -> None:
    target = target_of(root)
    committer(root).commit([write_unit(root, target, ["a", "b"])])
    overlapping = write_unit(root, target, ["b", "c"])
    committer(root).commit([overlapping])
    assert keys_in(root, target) == ["a", "b"]
    assert "c" not in Ledger(root).states(STAGE, FP)  # still missing: the job plans it anew
    committer(root).commit([write_unit(root, target, ["c"])])
    assert keys_in(root, target) == ["a", "b", "c"]


def test_a_stale_committer_starts_over(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(root)
    one, two = write_unit(root, target, ["a"]), write_unit(root, target, ["b"])
    slow, real = committer(root), Committer._swap
    raced = []

    def swap_after_another(self: Committer, dataset: lance.LanceDataset, *rest: object) -> bool:
        if self is slow and not raced:
            raced.append(True)
            committer(root).commit([two])
        return real(self, dataset, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "_swap", swap_after_another)
    slow.commit([one])
    assert raced and keys_in(root, target) == ["a", "b"]


def _commit_many(url: str, target: Target, names: list[str]) -> None:
    root = Root(url)
    for name in names:
        Committer(root, Ledger(root)).commit([write_unit(root, target, [name])])


def test_two_processes_lose_and_double_nothing(root: Root) -> None:
    target = target_of(root)
    mine, theirs, both = [f"m{i}" for i in range(6)], [f"t{i}" for i in range(6)], [f"b{i}" for i in range(4)]
    context = multiprocessing.get_context("spawn")
    lists = ([*mine, *both], [*both, *theirs])
    processes = [context.Process(target=_commit_many, args=(root.url, target, names)) for names in lists]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0, 0]
    committer(root).recover(STAGE, FP)
    assert keys_in(root, target) == sorted([*mine, *theirs, *both])


def test_failures_are_recorded_without_rows(root: Root) -> None:
    target = target_of(root)
    item = ItemResult("a", "v", "d", state="quarantined", reason="empty", message="the file is empty", damage=((1, 2),))
    record = stage_unit(root, UnitRecord(unit_id(STAGE, FP, ["a"]), target, (item,), (), "job"))
    assert UnitRecord.from_json(root.get_json(record.path) or {}) == record
    committer(root).commit([record])
    row = Ledger(root).states(STAGE, FP)["a"]
    assert (row.state, row.reason, row.rows) == ("quarantined", "empty", 0)
    assert keys_in(root, target) == []


def test_an_overlap_is_seen_before_the_other_has_written_its_ledger(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(root)
    mine, theirs = write_unit(root, target, ["a", "b"]), write_unit(root, target, ["b", "c"])

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Ledger, "append", die)  # swapped, not yet in the ledger: its record still stands
        with pytest.raises(KeyboardInterrupt):
            committer(root).commit([theirs])
    committer(root).commit([mine])
    assert keys_in(root, target) == ["b", "c"]


def test_a_record_that_another_worker_is_writing_is_no_record_yet(root: Root) -> None:
    """Locally it has a number behind its name until it is whole, which no store can be asked for."""
    target = target_of(root)
    record = write_unit(root, target, ["a"])
    other = write_unit(root, target, ["b"])
    half = Path(root.url, f"{other.path}#1")
    half.write_bytes(Path(root.url, other.path).read_bytes()[:100])
    committer(root).commit([record])
    assert committer(root).recover(STAGE, FP) == 1 and half.exists()
    assert keys_in(root, target) == ["a", "b"]
