"""Kill anything at any moment: after a resume the catalog equals an undisturbed one by keys, counts and digests.

The short form kills at every step of the commit protocol and at a few random moments; VIDEOFLOW_LONG=1 takes 60 videos
and 40 random moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import videoflow
from tests.jobs import run_job
from tests.killed_run import POINTS
from tests.test_job import facts, item_rows
from videoflow.recipe import Recipe
from videoflow.testing import make_barcode_video

LONG = bool(os.environ.get("VIDEOFLOW_LONG"))
NUM_VIDEOS = 60 if LONG else 5
RECIPE = Recipe(
    stages={"frames": {}, "shots": {"detector": "hsv"}, "quality": {}, "clips": {"by": "windows", "window_seconds": 1}}
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Videos, a bad one among them, and the catalog of an undisturbed run."""
    base = tmp_path_factory.mktemp("chaos")
    (base / "in").mkdir()
    for i in range(NUM_VIDEOS):
        make_barcode_video(base / "in" / f"{i:02}.mp4", num_frames=40 + i, offset=i * 100)
    (base / "in" / "bad.mp4").write_text("no video")
    (base / "r.yaml").write_text(json.dumps(RECIPE.model_dump(mode="json")))
    run_job(RECIPE, [base / "in"], base / "undisturbed")
    return {"base": base, "in": base / "in", "recipe": base / "r.yaml", "undisturbed": base / "undisturbed"}


def arguments(made: dict[str, Path], root: Path, engine: str = "local") -> list[str]:
    args = [
        "run",
        made["recipe"],
        "--source",
        made["in"],
        "--root",
        root,
        "--name",
        "x",
        "--engine",
        engine,
        "--workers",
        "2",
    ]
    return [str(a) for a in [*args, "--json"]]


def finish(made: dict[str, Path], root: Path, engine: str = "local") -> None:
    """Run to the end and compare with the undisturbed catalog."""
    result = run_job(RECIPE, [made["in"]], root, engine=engine)
    assert (result.done, result.quarantined, result.pending) == (NUM_VIDEOS, 1, 0)
    assert facts(root) == facts(made["undisturbed"])
    rows = item_rows(root)
    assert rows == item_rows(made["undisturbed"])
    assert all(len(set(keys)) == len(keys) for keys in rows.values())
    assert not list((root / "staging").rglob("*.json"))
    undisturbed, version = videoflow.open(str(made["undisturbed"])).version("x"), videoflow.open(str(root)).version("x")
    assert version.digest == undisturbed.digest
    with version.loader(batch_size=4, frames=4, fps=8, size=64, epochs=1, tail="pad") as loader:  # every byte is there
        assert sum(int(b["valid"].sum()) for b in loader) == len(version)


@pytest.mark.parametrize("nth", [1, 3] if LONG else [1])
@pytest.mark.parametrize("point", POINTS)
def test_death_at_every_step_of_the_commit_protocol(
    made: dict[str, Path], tmp_path: Path, point: str, nth: int
) -> None:
    if nth > 1 and point == "before-publish":
        pytest.skip("a job publishes once")
    command = [sys.executable, "-m", "tests.killed_run", point, str(nth), *arguments(made, tmp_path / "cat")]
    died = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr
    finish(made, tmp_path / "cat")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_random_kills(made: dict[str, Path], tmp_path: Path, engine: str) -> None:
    """Driver or any of its descendants (sandbox children, Ray's processes), at random moments, again and again."""
    chance, root = random.Random(7), tmp_path / "cat"
    kills = (40 if engine == "local" else 10) if LONG else 4 if engine == "local" else 2
    for _ in range(kills):
        command = [sys.executable, "-m", "videoflow.cli.main", *arguments(made, root, engine)]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_work(job, root)
        time.sleep(chance.uniform(0, 4 if engine == "local" else 12))
        tree = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        victims = [p for p in tree if "spawn_main" in " ".join(_command(p)) or "ray::" in " ".join(_command(p))]
        if victims and chance.random() < 0.6:
            chance.choice(victims).kill()
            job.wait(300)
        else:
            job.kill()
            job.wait(60)
        psutil.wait_procs(tree, timeout=30)
    # A child that is killed once is not held against its video.
    assert not any(row[1] == "crash" for row in facts(root).values())
    finish(made, root, engine)


def _wait_for_work(job: subprocess.Popen[bytes], root: Path) -> None:
    """Until the job has written its record, so that a kill hits work and not the start of Python."""
    before = set((root / "jobs").glob("*.json"))
    deadline = time.monotonic() + 120
    while job.poll() is None and time.monotonic() < deadline and not set((root / "jobs").glob("*.json")) - before:
        time.sleep(0.05)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
