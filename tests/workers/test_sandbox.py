"""One video that hangs, crashes or eats memory costs that video: the others are done, the job ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import videoflow
from tests.jobs import run_job
from videoflow.recipe import Recipe
from videoflow.testing import make_barcode_video
from workers import sandbox


@pytest.mark.parametrize(
    ("how", "code"), [("hang", "timeout"), ("crash", "crash"), ("allocate", "out_of_memory"), ("raise", "crash")]
)
def test_a_poisoned_video_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: str
) -> None:
    monkeypatch.setattr(sandbox, "DEADLINE_SECONDS", 8.0)
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 1 << 30)
    (tmp_path / "in").mkdir()
    for i, count in enumerate((30, 33, 36)):
        make_barcode_video(tmp_path / "in" / f"{i}.mp4", num_frames=count)
    stages = {
        "frames": {},
        "poison": {"use": "tests.workers.poison:Poison", "how": how},
        "shots": {"detector": "hsv"},
        "clips": {"by": "windows", "window_seconds": 1},
    }
    summary = run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat", workers=1)
    assert (summary.videos, summary.done, summary.quarantined, summary.pending) == (3, 2, 1, 0)
    (bad,) = videoflow.open(str(tmp_path / "cat")).quarantine()
    assert (Path(bad["uri"]).name, bad["class"]) == ("1.mp4", code)
    assert summary.clips == 2
    again = run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat", workers=1)
    assert (again.decoded_videos, again.quarantined) == (0, 1)


def test_a_video_that_is_slow_but_goes_on_is_no_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for the next frame, not for the video: 40 frames of half a second each, under a limit of 15 s."""
    monkeypatch.setattr(sandbox, "DEADLINE_SECONDS", 15.0)
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=40)
    crawl = {"use": "tests.workers.poison:Poison", "how": "crawl", "seconds_a_frame": 0.5}
    summary = run_job(Recipe(stages={"frames": {}, "poison": crawl}), [tmp_path / "in"], tmp_path / "cat", workers=1)
    assert (summary.done, summary.quarantined) == (1, 0)


def test_an_hour_of_video_is_decoded_whole(tmp_path: Path) -> None:
    """3600 frames, one a second: small to store, long to play."""
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "hour.mp4", num_frames=3600, rate="1")
    stages = {"frames": {"fps": "1"}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 600}}
    summary = run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat", workers=1)
    assert (summary.done, summary.frames_decoded, summary.clips) == (1, 3600, 6)
    version = videoflow.open(tmp_path / "cat").version("x")
    assert version.sql("SELECT sum(num_frames) AS n, max(t1_us) AS t FROM clips").to_pylist() == [
        {"n": 3600, "t": 3_600_000_000}
    ]


def test_a_stage_that_stumbles_over_a_video_costs_only_that(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, count in enumerate((30, 33, 36)):
        make_barcode_video(tmp_path / "in" / f"{i}.mp4", num_frames=count)
    stages = {
        "frames": {},
        "clips": {"by": "windows", "window_seconds": 1},
        "picky": {"use": "tests.picky_stage:Picky"},
    }
    summary = run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat", workers=1)
    assert (summary.done, summary.quarantined, summary.pending) == (2, 1, 0)
    (bad,) = videoflow.open(str(tmp_path / "cat")).quarantine()
    assert (Path(bad["uri"]).name, bad["class"], bad["stage"], bad["message"]) == (
        "1.mp4",
        "model_error",
        "picky",
        "KeyError: 33",
    )
