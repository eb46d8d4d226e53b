"""Kill anything at any moment: after a resume the catalog equals an undisturbed one by keys, counts and digests.

The short form kills at every step of the commit protocol and every kind of process at least once; VIDEOFLOW_LONG=1 takes
60 videos and more than 40 random moments. The same on S3 behind a proxy that lets one request in ten fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.catalogs import assert_gc_leaves_no_orphan, assert_same, facts, parts
from tests.jobs import run_job
from tests.killed_run import POINTS
from tests.rampage import DRIVER, rampage
from tests.s3_server import Server, client, faulty_proxy, moto_server, use
from videoflow.recipe import Recipe
from videoflow.store.layout import Root
from videoflow.store.writer import open_table
from videoflow.testing import make_barcode_video

LONG = bool(os.environ.get("VIDEOFLOW_LONG"))
NUM_VIDEOS = 60 if LONG else 5
SECONDS = 7200 if LONG else 600
pytestmark = pytest.mark.timeout(SECONDS)  # the long form takes what it takes
STAGES = {
    "frames": {"short_side": 32},
    "shots": {"detector": "hsv"},
    "quality": {},
    "clips": {"by": "windows", "window_seconds": 1},
    "slow_luma": {"use": "tests.slow_stage:SlowLuma", "seconds": 0.02 if LONG else 0.15},
}
RECIPE = Recipe(stages=STAGES)
#: Shares the decode products with the other recipe, not the clips.
OVERLAPPING = Recipe(stages={**STAGES, "clips": {"by": "windows", "window_seconds": 0.5}})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Videos, a bad one among them, and the catalog of an undisturbed run."""
    base = tmp_path_factory.mktemp("chaos")
    (base / "in").mkdir()
    for i in range(NUM_VIDEOS):
        make_barcode_video(base / "in" / f"{i:02}.mp4", num_frames=40 + i % 20, offset=i * 100)
    (base / "in" / "bad.mp4").write_text("no video")
    for name, recipe in (("r", RECIPE), ("overlapping", OVERLAPPING)):
        (base / f"{name}.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    run_job(RECIPE, [base / "in"], base / "undisturbed")
    return {"base": base, "in": base / "in", "undisturbed": base / "undisturbed"}


def arguments(
    made: dict[str, Path], root: object, engine: str = "local", recipe: str = "r", name: str = "x"
) -> list[str]:
    args = ["run", made["base"] / f"{recipe}.yaml", "--source", made["in"], "--root", root, "--name", name]
    return [str(a) for a in [*args, "--engine", engine, "--workers", "2", "--json"]]


def finish(made: dict[str, Path], root: str | Path, engine: str = "local") -> None:
    """Run to the end and compare with the undisturbed catalog."""
    result = run_job(RECIPE, [made["in"]], root, engine=engine)
    assert (result.done, result.quarantined, result.pending) == (NUM_VIDEOS, 1, 0)
    # A child that is killed once or twice is not held against its video.
    assert not any(row[1] == "crash" for row in facts(root).values())
    assert_same(root, made["undisturbed"])
    assert_gc_leaves_no_orphan(root)
    assert_same(root, made["undisturbed"])


def at_steps() -> list[str]:
    stages = ("frames", "slow_luma") if LONG else ("",)
    steps = [f"{p}@{s}" if s else p for p in POINTS for s in stages if not (s and p.endswith(("publish", "claim")))]
    return steps + (["before-publish", "after-claim"] if LONG else ["after-stage@slow_luma", "after-swap@slow_luma"])


@pytest.mark.parametrize("step", at_steps())
def test_death_at_every_step_of_the_commit_protocol(made: dict[str, Path], tmp_path: Path, step: str) -> None:
    command = [sys.executable, "-m", "tests.killed_run", step, "1", "SIGKILL", *arguments(made, tmp_path / "cat")]
    died = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert died.returncode == -signal.SIGKILL, died.stderr
    finish(made, tmp_path / "cat")


LOCAL_KILLS = {(DRIVER, "decode"): 1, (DRIVER, "slow_luma"): 1, ("sandbox", "decode"): 2}
RAY_KILLS = {("actor", "decode"): 1, ("sandbox", "decode"): 1, (DRIVER, "slow_luma"): 1}
if LONG:
    LOCAL_KILLS = {(DRIVER, "decode"): 5, (DRIVER, "slow_luma"): 4, (DRIVER, "clips"): 1, ("sandbox", "decode"): 14}
    RAY_KILLS = {
        (DRIVER, "decode"): 3,
        (DRIVER, "slow_luma"): 2,
        ("actor", "decode"): 5,
        ("actor", "slow_luma"): 3,
        ("sandbox", "decode"): 5,
        ("idle ray worker", "decode"): 2,
        ("raylet", "decode"): 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "wanted"), [("local", LOCAL_KILLS), ("ray", RAY_KILLS)], ids=["local", "ray"])
def test_random_kills(
    made: dict[str, Path],
    tmp_path: Path,
    engine: str,
    wanted: dict[tuple[str, str], int],
    capsys: pytest.CaptureFixture,
) -> None:
    """Drivers, sandbox children, actors and Ray's own processes, in ingest and in enrichment, again and again."""
    hits = rampage(
        lambda n: arguments(made, tmp_path / f"cat{n}", engine),
        wanted,
        seed=7,
        check=lambda n: finish(made, tmp_path / f"cat{n}", "local"),
    )
    assert hits == wanted
    with capsys.disabled():
        print(f"\n{engine}: {sum(hits.values())} kills {dict(hits)}")


def test_two_drivers_at_once_on_overlapping_recipes(made: dict[str, Path], tmp_path: Path) -> None:
    root, reference = tmp_path / "cat", tmp_path / "reference"
    for recipe, name in ((RECIPE, "x"), (OVERLAPPING, "y")):
        run_job(recipe, [made["in"]], reference, name=name)
    commands = [arguments(made, root), arguments(made, root, recipe="overlapping", name="y")]
    drivers = [
        subprocess.Popen([sys.executable, "-m", "videoflow.cli.main", *c], stdout=subprocess.PIPE) for c in commands
    ]
    answers = [json.loads(d.communicate(timeout=SECONDS)[0]) for d in drivers]
    assert [(a["done"], a["quarantined"], a["pending"]) for a in answers] == [(NUM_VIDEOS, 1, 0)] * 2
    for name in ("x", "y"):
        assert_same(root, reference, name=name)
    assert_gc_leaves_no_orphan(root)


@pytest.mark.parametrize("step", ["before-swap@frames", "before-stage@frames", "after-stage@slow_luma"])
def test_a_paused_driver_wakes_after_others_and_a_compaction(made: dict[str, Path], tmp_path: Path, step: str) -> None:
    """Another driver commits the same units, then the tables are compacted: the old fragment must not come again."""
    root = tmp_path / "cat"
    command = [sys.executable, "-m", "tests.killed_run", step, "1", "SIGSTOP", *arguments(made, root)]
    paused = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_stopped(paused)
        other = run_job(RECIPE, [made["in"]], root)
        assert (other.done, other.pending) == (NUM_VIDEOS, 0)
        removed = 0
        for path in parts(Root.at(root)):
            removed += open_table(Root.at(root), path).optimize.compact_files().fragments_removed
        assert removed > NUM_VIDEOS
    finally:
        paused.send_signal(signal.SIGCONT)
    out, err = paused.communicate(timeout=SECONDS)
    assert paused.returncode == 0, err
    assert json.loads(out)["pending"] == 0
    finish(made, root)


def _wait_until_stopped(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None and time.monotonic() < deadline, "it never came to that step"
        time.sleep(0.05)


# -- the same on S3 --------------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A bucket ``chaos`` behind a proxy that lets one request in ten fail."""
    with moto_server() as server, faulty_proxy(server, rate=0.1, seed=11) as proxy:
        use(server, monkeypatch)
        client().create_bucket(Bucket="chaos")
        use(proxy, monkeypatch)
        yield proxy


@pytest.mark.slow
def test_random_kills_on_s3_behind_a_faulty_proxy(
    made: dict[str, Path], faulty: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = {(DRIVER, "decode"): 3, ("sandbox", "decode"): 3, (DRIVER, "slow_luma"): 2}
    wanted = kills if LONG else {(DRIVER, "decode"): 1, ("sandbox", "decode"): 1}
    hits = rampage(
        lambda n: arguments(made, f"s3://chaos/cat{n}"),
        wanted,
        seed=5,
        check=lambda n: finish(made, f"s3://chaos/cat{n}"),
        environ=faulty.full_environ(),
    )
    counts = faulty.counts()
    assert hits == wanted
    faults = sum(n for kind, n in counts.items() if kind not in ("requests", "passed"))
    assert faults > 0.05 * counts["requests"] > 20
    with capsys.disabled():
        print(
            f"\nS3: {sum(hits.values())} kills {dict(hits)}; {faults} of {counts['requests']} requests failed: {counts}"
        )


def test_a_paused_driver_on_s3_wakes_after_others(made: dict[str, Path], faulty: Server) -> None:
    root = "s3://chaos/paused"
    command = [sys.executable, "-m", "tests.killed_run", "before-swap@frames", "1", "SIGSTOP", *arguments(made, root)]
    paused = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_stopped(paused)
        assert run_job(RECIPE, [made["in"]], root).pending == 0
        open_table(
            Root.at(root), next(p for p in parts(Root.at(root)) if p.startswith("frames/"))
        ).optimize.compact_files()
    finally:
        paused.send_signal(signal.SIGCONT)
    _, err = paused.communicate(timeout=SECONDS)
    assert paused.returncode == 0, err
    finish(made, root)
