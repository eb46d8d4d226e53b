"""Table parts: a full part closes for good, the next one begins, and no item comes into both."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

import videoflow
from tests.catalogs import assert_gc_leaves_no_orphan, facts, item_rows, parts
from tests.jobs import run_job
from tests.store.test_commit import FP, SCHEMA, STAGE, committer, target_of, write_unit
from videoflow.dataset.catalog import Catalog
from videoflow.recipe import Recipe
from videoflow.store import writer
from videoflow.store.commit import Committer
from videoflow.store.layout import Root
from videoflow.store.ledger import Ledger
from videoflow.store.writer import begin_next_part, is_closed, open_table, open_target, part_path, parts_of
from videoflow.testing import make_barcode_video

RECIPE = Recipe(
    stages={
        "frames": {"short_side": 32},
        "shots": {"detector": "hsv"},
        "clips": {"by": "windows", "window_seconds": 1},
        "colour": {"use": "tests.cli.scorer:MeanColour"},
    }
)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Catalog.open(tmp_path / "cat", create=True).root


def keys_by_part(root: Root) -> list[list[str]]:
    paths = [part_path("mine", FP, n) for n in parts_of(root, "mine", FP)]
    return [sorted(open_table(root, p).to_table(columns=["item_key"])["item_key"].to_pylist()) for p in paths]


def test_the_committer_closes_a_full_part(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_FRAGMENTS", 2)
    for name in "abc":
        committer(root).commit([write_unit(root, open_target(root, target_of(root)), [name])])
    assert keys_by_part(root) == [["a", "b"], ["c"]]
    assert is_closed(open_table(root, part_path("mine", FP)))
    assert target_of(root).part == 1


def test_a_unit_staged_for_a_closed_part_is_planned_anew(root: Root) -> None:
    old = target_of(root)
    late, new = write_unit(root, old, ["a", "b"]), begin_next_part(root, old, SCHEMA)
    assert (new.part, open_target(root, old).part) == (1, 1)
    one = committer(root)
    one.commit([late])
    assert keys_by_part(root) == [[], []] and Ledger(root).states(STAGE, FP) == {} and not root.has(late.path)
    one.commit([write_unit(root, open_target(root, old), ["a", "b"])])  # the same unit by name
    assert keys_by_part(root) == [[], ["a", "b"]]


def test_a_commit_that_has_not_seen_the_mark_fails_at_the_fence(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part closes between a committer's look and its swap, and another one brings the same item to the next part."""
    target = target_of(root)
    mine, slow, real = write_unit(root, target, ["a", "b"]), committer(root), Committer._swap
    raced: list[bool] = []

    def swap_after_the_part_closed(self: Committer, *args: object) -> bool:
        if self is slow and not raced:
            raced.append(True)
            begin_next_part(root, target, SCHEMA)
            with monkeypatch.context() as m:
                m.setattr(Ledger, "append", lambda *a, **k: None)  # its ledger rows come later
                committer(root).commit([write_unit(root, open_target(root, target), ["b", "c"])])
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "_swap", swap_after_the_part_closed)
    slow.commit([mine])
    assert raced and keys_by_part(root) == [[], ["b", "c"]]


def test_what_a_closed_part_holds_is_seen_before_the_ledger_says_so(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(root)
    with monkeypatch.context() as m:
        m.setattr(Ledger, "append", _die)  # the record stays, as it does until the ledger has it
        with pytest.raises(KeyboardInterrupt):
            committer(root).commit([write_unit(root, target, ["a", "b"])])
    new = begin_next_part(root, target, SCHEMA)
    committer(root).commit([write_unit(root, new, ["b", "c"])])
    assert keys_by_part(root) == [["a", "b"], []]


@pytest.mark.parametrize("died", ["before the fence", "before the next part"])
def test_a_closing_that_was_cut_short_is_ended_by_the_next(
    root: Root, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    target = target_of(root)
    committer(root).commit([write_unit(root, target, ["a"])])
    with monkeypatch.context() as m:
        m.setattr(writer, "_swap_nothing" if died == "before the fence" else "create_table", _die)
        with pytest.raises(KeyboardInterrupt):
            begin_next_part(root, target, SCHEMA)
    assert parts_of(root, "mine", FP) == [0]
    assert target_of(root).part == 1
    assert keys_by_part(root) == [["a"], []]


def _die(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_a_part_whose_maker_was_killed_is_none_yet(root: Root) -> None:
    target_of(root)
    Path(root.uri(part_path("mine", FP, 1)), "_transactions").mkdir(parents=True)
    assert parts_of(root, "mine", FP) == [0]


def _commit_many(url: str, names: list[str]) -> None:
    root = Root(url)
    writer.MAX_FRAGMENTS = 3
    one = Committer(root, Ledger(root))
    for name in names:
        while name not in Ledger(root).states(STAGE, FP):
            one.commit([write_unit(root, open_target(root, target_of(root)), [name])])


def test_two_committers_race_for_the_new_parts(root: Root) -> None:
    target_of(root)
    both = [f"b{i}" for i in range(4)]
    lists = ([*both, *(f"m{i}" for i in range(4))], [*(f"t{i}" for i in range(4)), *both])
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_commit_many, args=(root.url, names)) for names in lists]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0, 0]
    found = keys_by_part(root)
    assert sorted(k for keys in found for k in keys) == sorted({*lists[0], *lists[1]})
    assert len(found) >= 4 and all(len(keys) == 3 for keys in found[:-1])


def test_job_plan_and_loader_read_over_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for i in range(5):
        make_barcode_video(tmp_path / "in" / f"{i}.mp4", num_frames=45, offset=100 * i)
    whole, split = tmp_path / "whole", tmp_path / "split"
    run_job(RECIPE, [tmp_path / "in"], whole)
    monkeypatch.setattr(writer, "MAX_FRAGMENTS", 2)
    first = run_job(RECIPE, [tmp_path / "in"], split)
    assert facts(split) == facts(whole) and item_rows(split) == item_rows(whole)
    assert len([p for p in parts(Root.at(split)) if p.startswith("frames/")]) == 3
    again = run_job(RECIPE, [tmp_path / "in"], split)
    assert (again.decoded_videos, again.version) == (0, first.version)
    assert_gc_leaves_no_orphan(split)
    batches = []
    for where in (whole, split):
        version = videoflow.open(where).version("x")
        with version.loader(
            batch_size=5, frames=4, fps=4, size=32, epochs=1, tail="pad", seed=3, columns=("embedding",)
        ) as loader:
            batches.append(list(loader))
    for a, b in zip(*batches, strict=True):
        assert a["clip_key"] == b["clip_key"] and bool((a["video"] == b["video"]).all())
        assert bool((a["embedding"] == b["embedding"]).all())
    hits = videoflow.open(split).version("x").search(batches[0][0]["clip_key"][0], k=3)
    assert len(hits) == 3
