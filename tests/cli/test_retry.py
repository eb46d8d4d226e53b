"""Trying quarantined items again: `quarantine retry`."""

from __future__ import annotations

from pathlib import Path

import pytest

import videoflow
from tests.jobs import run_job
from tests.test_job import facts, item_rows
from videoflow.dataset.catalog import Catalog
from videoflow.dataset.retry import Retried, retry_quarantined
from videoflow.errors import MediaError, QueryError
from videoflow.recipe import Recipe
from videoflow.store.commit import UnitRecord, stage_unit, unit_id
from videoflow.store.ledger import QUARANTINED, ItemResult
from videoflow.store.writer import Target
from videoflow.testing import make_barcode_video
from workers.sandbox import Sandbox

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}})


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(3):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=45, offset=100 * i)
    return folder


def failing(monkeypatch: pytest.MonkeyPatch, classes: dict[str, str]) -> None:
    """Decoding fails for files of these names, with these classes: a failure that passes."""
    real = Sandbox.decode

    def decode(self: Sandbox, path: str, **options: object) -> object:
        if Path(path).name in classes:
            raise MediaError(classes[Path(path).name], "a bad day")
        return real(self, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Sandbox, "decode", decode)


def test_the_next_run_tries_again_and_ends_as_if_nothing_had_been(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, root = tmp_path / "undisturbed", tmp_path / "cat"
    run_job(RECIPE, [videos], undisturbed, workers=1)
    with monkeypatch.context() as m:
        failing(m, {"v0.mp4": "timeout", "v1.mp4": "io_error"})
        first = run_job(RECIPE, [videos], root, workers=1)
        assert (first.done, first.quarantined) == (1, 2)
        assert run_job(RECIPE, [videos], root, workers=1).decoded_videos == 0
    assert run_job(RECIPE, [videos], root, workers=1).decoded_videos == 0  # a rerun alone tries nothing again

    catalog = Catalog.open(root)
    assert retry_quarantined(catalog, classes=["timeout"]) == Retried(3, 1, 0)  # probe, frames, shots of one video
    assert [r["class"] for r in catalog.quarantine()] == ["io_error"]
    assert retry_quarantined(catalog, classes=["timeout"]) == Retried(0, 0, 0)
    second = run_job(RECIPE, [videos], root, workers=1)
    assert (second.done, second.quarantined, second.decoded_videos) == (2, 1, 1)

    assert retry_quarantined(catalog, uri=str(videos / "v1.mp4")) == Retried(3, 1, 0)
    third = run_job(RECIPE, [videos], root, workers=1)
    assert (third.done, third.quarantined, third.decoded_videos) == (3, 0, 1)
    assert facts(root) == facts(undisturbed) and item_rows(root) == item_rows(undisturbed)
    assert catalog.quarantine() == [] and third.clips == len(videoflow.open(str(undisturbed)).version("x").clips())
    assert run_job(RECIPE, [videos], root, workers=1).version == third.version


def test_what_fails_again_is_quarantined_again(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cat"
    failing(monkeypatch, {"v0.mp4": "crash"})
    run_job(RECIPE, [videos], root, workers=1)
    catalog = Catalog.open(root)
    before = catalog.quarantine()
    retry_quarantined(catalog)
    assert catalog.quarantine() == []
    assert run_job(RECIPE, [videos], root, workers=1).quarantined == 1
    assert catalog.quarantine() == before
    monkeypatch.undo()
    retry_quarantined(catalog)
    assert run_job(RECIPE, [videos], root, workers=1).done == 3


def test_a_record_that_waits_does_not_undo_a_retry(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committer that died after the ledger and before the record was removed."""
    root = tmp_path / "cat"
    with monkeypatch.context() as m:
        failing(m, {"v0.mp4": "crash"})
        run_job(RECIPE, [videos / "v0.mp4"], root, workers=1)
    catalog = Catalog.open(root)
    (row,) = catalog.ledger.table(["fingerprint", "item_key", "video_key"], "stage = 'frames'").to_pylist()
    unit = unit_id("frames", row["fingerprint"], [row["item_key"]])
    item = ItemResult(row["item_key"], row["video_key"], row["video_key"], state=QUARANTINED, reason="crash")
    target = Target("frames", row["fingerprint"], "frames", 0, 1)
    record = stage_unit(catalog.root, UnitRecord(unit, target, (item,), (), "job"))
    assert retry_quarantined(catalog).videos == 1 and not catalog.root.has(record.path)
    assert run_job(RECIPE, [videos / "v0.mp4"], root, workers=1).done == 1


def test_unknown_classes_and_sources(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    (videos / "gone.mp4").symlink_to("/nowhere/gone.mp4")
    run_job(RECIPE, [videos], root, workers=1)
    catalog = Catalog.open(root)
    with pytest.raises(QueryError, match="unknown quarantine class 'bad'"):
        retry_quarantined(catalog, classes=["bad"])
    with pytest.raises(QueryError, match="no source 'nowhere'"):
        retry_quarantined(catalog, uri="nowhere")
    assert retry_quarantined(catalog) == Retried(0, 0, 1)  # an unreadable source: looked at by every run
    assert [r["class"] for r in catalog.quarantine()] == ["io_error"]


def test_the_command(call, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "cat"
    with monkeypatch.context() as m:
        failing(m, {"v0.mp4": "timeout", "v1.mp4": "crash"})
        run_job(RECIPE, [videos], root, workers=1)
    said = call("quarantine", "retry", root, "--class", "timeout", "--class", "crash", "--uri", videos / "v0.mp4")
    assert said.code == 0 and said.out.startswith("3 results of 1 videos will be tried again")
    assert call("quarantine", "retry", root, "--json").rows == [{"items": 3, "videos": 1, "unreadable": 0}]
    assert call("quarantine", "list", root, "--json").rows == []
    wrong = call("quarantine", "retry", root, "--class", "bad")
    assert wrong.code == 2 and "allowed: empty" in wrong.err
