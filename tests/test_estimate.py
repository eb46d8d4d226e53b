"""What a plan says it will cost: length from headers or from what is known, time from past jobs only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import run_job
from videoflow.dataset.catalog import Catalog
from videoflow.estimate import DECODE, Estimate, estimate
from videoflow.forecast import forecast
from videoflow.identify import identify
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.testing import make_barcode_video

STAGES = {"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}}


def estimate_of(catalog: Catalog, recipe: Recipe, folder: Path, *, workers: int = 2) -> Estimate:
    found = identify(catalog, scan([str(folder)]), job=None)
    plan = Plan(catalog.root, catalog.ledger, recipe, recipe.build(), found.videos)
    videos = {v.video_key: v for some in plan.missing_products().values() for v in some}
    return estimate(catalog, plan, forecast(plan), list(videos.values()), workers=workers)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=90)
    make_barcode_video(tmp_path / "in" / "b.mp4", num_frames=60)
    return tmp_path / "in"


def test_without_a_past_job_the_length_is_known_and_the_time_is_not(tmp_path: Path, videos: Path) -> None:
    catalog = Catalog.open(tmp_path / "cat", create=True)
    cost = estimate_of(catalog, Recipe(stages=STAGES), videos)
    assert cost.video_seconds == pytest.approx(5.0, rel=0.05) and cost.frames == pytest.approx(150, rel=0.05)
    assert cost.frame_cache_bytes
    assert (cost.jobs, cost.stage_seconds) == (0, {DECODE: None, "clips": None})


def test_times_are_those_of_past_jobs_by_frame_and_item(tmp_path: Path, videos: Path) -> None:
    run_job(Recipe(stages=STAGES), [videos], tmp_path / "cat")
    catalog = Catalog.open(tmp_path / "cat")
    assert estimate_of(catalog, Recipe(stages=STAGES), videos) == Estimate(0.0, 0, 0, 2, {}, 0)

    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    job = json.loads(record.read_text())
    job["summary"]["stages"]["decode"]["worker_seconds"] = 30.0  # of 150 frames: 0.2 s each
    job["summary"]["stages"]["clips"] |= {"worker_seconds": 4.0, "items": 2}
    record.write_text(json.dumps(job))
    other = Recipe(stages={**STAGES, "frames": {"fps": "4"}})  # the cache anew; clips are there and stay
    cost = estimate_of(catalog, other, videos)
    assert cost.jobs == 1 and set(cost.stage_seconds) == {DECODE}
    assert cost.stage_seconds[DECODE] == pytest.approx(15.0, rel=0.05)  # two workers
    gpu = estimate_of(catalog, other.model_copy(update={"decoder": "nvdec"}), videos)
    assert gpu.stage_seconds[DECODE] is None  # that took the CPU
    windows = Recipe(stages={**STAGES, "clips": {"by": "windows", "window_seconds": 2}})
    assert estimate_of(catalog, windows, videos, workers=1).stage_seconds == {"clips": pytest.approx(4.0)}


def test_jobs_with_the_same_parameters_are_believed_first(tmp_path: Path, videos: Path) -> None:
    for fps, seconds in (("8", 150.0), ("4", 15.0)):
        run_job(Recipe(stages={**STAGES, "frames": {"fps": fps}}), [videos], tmp_path / "cat")
        newest = max((tmp_path / "cat" / "jobs").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        job = json.loads(newest.read_text())
        job["summary"]["stages"]["decode"]["worker_seconds"] = seconds
        newest.write_text(json.dumps(job))
    make_barcode_video(videos / "c.mp4", num_frames=150)
    catalog = Catalog.open(tmp_path / "cat")
    cost = estimate_of(catalog, Recipe(stages={**STAGES, "frames": {"fps": "8"}}), videos, workers=1)
    assert cost.stage_seconds[DECODE] == pytest.approx(150.0, rel=0.05)
    cost = estimate_of(catalog, Recipe(stages={**STAGES, "frames": {"fps": "2"}}), videos, workers=1)
    assert cost.stage_seconds[DECODE] == pytest.approx(300 * 165 / 300, rel=0.05)  # of both jobs


def test_what_shows_only_after_decoding_is_as_much_a_video_as_it_was(tmp_path: Path, videos: Path) -> None:
    luma = {"use": "tests.slow_stage:SlowLuma"}
    recipe = Recipe(stages={**STAGES, "slow_luma": luma})
    run_job(recipe, [videos], tmp_path / "cat")  # 2 videos of 3 and 2 clips
    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    job = json.loads(record.read_text())
    job["summary"]["stages"]["clips"]["worker_seconds"] = 4.0  # 2 s a video
    job["summary"]["stages"]["slow_luma"]["worker_seconds"] = 10.0  # 2 s a clip, 2.5 of them a video
    record.write_text(json.dumps(job))
    for i in range(4):
        make_barcode_video(videos / f"new{i}.mp4", num_frames=90, offset=1000 * (i + 1))
    cost = estimate_of(Catalog.open(tmp_path / "cat"), recipe, videos, workers=2)
    assert cost.stage_seconds["clips"] == pytest.approx(4 * 2 / 2)
    assert cost.stage_seconds["slow_luma"] == pytest.approx(4 * 2.5 * 2 / 2)
