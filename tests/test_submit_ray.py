"""`videoflow submit` against a real `ray start --head`: a token, another interpreter than the one on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs import run_job
from tests.ray_cluster import TOKEN, Cluster, ray_cluster
from tests.test_job import facts, item_rows
from videoflow import recipe as recipes
from videoflow.jobs import RayJobs
from videoflow.testing import make_barcode_video

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(900),
]  # jobs of a cluster on a machine that does other things

#: A stage of the user's own in a module that only the submitting side has. It waits while a file is there.
STAGE = """
import time
from pathlib import Path

import pyarrow as pa

from videoflow.keys import digest
from videoflow.stage import ClipStage, Product
from videoflow.store.schemas import ARTIFACT_HEAD

HOLD = Path({hold!r})


class Luma(ClipStage):
    name, version, table = "held_luma", 1, "held_luma"

    def schema(self):
        return pa.schema([*ARTIFACT_HEAD, pa.field("clip_key", pa.string()), pa.field("luma", pa.float32())])

    def process(self, clips):
        while HOLD.exists():
            time.sleep(0.05)
        return [Product([{{"clip_key": c.clip_key, "luma": float(c.video.mean())}}], digest(c.clip_key)) for c in clips]
"""
RECIPE = """
from videoflow import Recipe

luma = {"use": "held_stage:Luma"}
recipe = Recipe(name="mine", stages={"frames": {}, "shots": {"detector": "hsv"},
                                     "clips": {"by": "windows", "window_seconds": 1}, "luma": luma})
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as running:
        yield running


class Desk:
    """Where somebody submits from: a recipe, a stage and videos."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.hold, self.root = folder / "hold", folder / "cat"
        (folder / "src").mkdir()
        (folder / "src" / "held_stage.py").write_text(STAGE.format(hold=str(self.hold)))
        (folder / "mine.py").write_text(RECIPE)
        (folder / "videos").mkdir()
        for i in range(3):
            make_barcode_video(folder / "videos" / f"v{i}.mp4", num_frames=45, offset=100 * i)

    def start(self, *args: object) -> subprocess.Popen[str]:
        """`videoflow ARGS…` on the submitting side, without Ray: who submits needs HTTP only."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        paths = [str(self.folder / "src"), *env.get("PYTHONPATH", "").split(os.pathsep)]
        env |= {"RAY_AUTH_TOKEN_PATH": str(self.cluster.token_file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        code = "import sys; sys.modules['ray'] = None; from videoflow.cli.main import main; main()"
        command = [sys.executable, "-c", code, *map(str, args)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def call(self, *args: object) -> tuple[int, str, str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=400)
        return process.returncode, out, err

    def submit(self, *more: object) -> list[object]:
        where = ["--source", self.folder / "videos", "--root", self.root, "--name", "x"]
        return ["submit", "mine.py", *where, "--address", self.cluster.address, *more]

    def record(self, job: str) -> dict[str, Any]:
        path = self.root / "jobs" / f"{job}.json"
        return json.loads(path.read_text()) if path.exists() else {"state": None}


@pytest.fixture
def desk(tmp_path: Path, cluster: Cluster) -> Desk:
    return Desk(tmp_path, cluster)


def wait(holds: Callable[[], bool], seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.1)


def test_a_job_is_left_cancelled_and_resumed_on_the_cluster(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.hold.touch()
    following = desk.start(*desk.submit("--follow", "--workers", 1))
    first = following.stdout.readline() if following.stdout else ""
    assert first.startswith("submitted job "), following.communicate()[1]
    job = first.split()[2]
    assert first == f"submitted job {job} to {desk.cluster.address} (Ray {_ray_version()})\n"
    wait(lambda: desk.record(job).get("stage") == "luma")

    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 130
    assert f"no longer following job {job}, which goes on: `videoflow status {desk.root} {job} -f`" in err
    assert "goes along: held_stage.py (1 files)" in err and f"job {job}" in out

    record = desk.record(job)
    assert (record["state"], record["submission"]) == ("running", job)
    assert "submitted to a Ray cluster as" in desk.call("status", desk.root, job)[1]
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    info = RayJobs(desk.cluster.address).info(job)
    assert info is not None and info["entrypoint"].startswith("sh launch.sh run recipe.yaml --root ")
    assert info["metadata"] == {"videoflow_job": job, "videoflow_root": str(desk.root), "videoflow_name": "x"}

    assert desk.call("cancel", desk.root, job)[0] == 0
    wait(lambda: desk.record(job)["state"] != "running")
    assert desk.record(job)["state"] == "cancelled"

    desk.hold.unlink()
    code, out, _ = desk.call("resume", desk.root, job, "--address", desk.cluster.address, "--json")
    second = json.loads(out)["job"]
    assert code == 0
    wait(lambda: desk.record(second)["state"] not in (None, "running"))
    record = desk.record(second)
    assert (record["state"], record["resumes"], record["submission"]) == ("finished", job, second)
    assert (record["summary"]["decoded_videos"], record["summary"]["version"]) == (0, "x@1")
    wait(lambda: (RayJobs(desk.cluster.address).info(second) or {}).get("status") == "SUCCEEDED")  # a moment later
    code, out, _ = desk.call("logs", desk.root, second, "--address", desk.cluster.address)
    assert code == 0 and out.splitlines()[-1] == "to the cluster it is succeeded"

    monkeypatch.syspath_prepend(str(desk.folder / "src"))
    alone = desk.folder / "alone"
    run_job(recipes.load(str(desk.folder / "mine.py")), [desk.folder / "videos"], alone)
    assert facts(desk.root) == facts(alone) and item_rows(desk.root) == item_rows(alone)


def test_followers_end_as_the_job_does(desk: Desk) -> None:
    code, out, err = desk.call(*desk.submit("--engine", "local", "--wait", "--json"))
    first, summary = map(json.loads, out.splitlines())
    assert code == 0, err
    assert (summary["job"], summary["version"], summary["decoded_videos"]) == (first["job"], "x@1", 3)
    assert first["submission"] == first["job"] and "Running entrypoint for job" in err

    (desk.folder / "bad").mkdir()
    (desk.folder / "bad" / "no.mp4").write_text("no video")
    args = desk.submit("--follow", "--engine", "local")
    args[3] = desk.folder / "bad"
    assert desk.call(*args)[0] == 3
    args[3] = desk.folder / "nowhere"
    code, out, _ = desk.call(*args)
    assert code == 2 and "does not exist" in out.splitlines()[-1]
    code, _, err = desk.call(*desk.submit("--follow", "--python", "/nowhere/python"))
    assert code == 4 and "/nowhere/python" in err.splitlines()[-1]
    assert "did not end as videoflow does: job entrypoint command error" in err.splitlines()[-1]


def test_the_cluster_stops_what_the_catalog_may_not_know(desk: Desk) -> None:
    desk.hold.touch()
    _, out, _ = desk.call(*desk.submit("--engine", "local", "--json"))
    job = json.loads(out)["job"]
    wait(lambda: desk.record(job).get("stage") == "luma")
    assert desk.call("cancel", desk.root, job, "--address", desk.cluster.address)[0] == 0
    wait(lambda: not psutil.pid_exists(desk.record(job)["pid"]))
    code, out, _ = desk.call("status", desk.root, job, "--json")
    assert code == 0 and json.loads(out)["state"] in ("stopped", "lost")
    wait(lambda: "it is stopped" in desk.call("logs", desk.root, job, "--address", desk.cluster.address)[1])
    code, _, err = desk.call("cancel", desk.root, "nobody", "--address", desk.cluster.address)
    assert code == 2 and "knows no job 'nobody'" in err


def test_a_token_that_is_missing_or_wrong(desk: Desk) -> None:
    wrong = desk.folder / "wrong"
    wrong.write_text("another token, long enough to be one 0123456789")
    desk.cluster = replace(desk.cluster, token_file=wrong)
    code, _, err = desk.call(*desk.submit())
    assert code == 2 and f"the token in {wrong} is not this cluster's" in err.splitlines()[-1]
    empty = desk.folder / "empty"
    empty.touch()
    desk.cluster = replace(desk.cluster, token_file=empty)
    code, _, err = desk.call(*desk.submit())
    assert code == 2 and "which is empty" in err
    assert not desk.root.exists()


def test_an_attached_engine_has_the_clusters_cores(cluster: Cluster) -> None:
    code = "from workers.ray_engine import RayEngine as R; e = R(workers=None); print(e.workers); e.close()"
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_ADDRESS": cluster.gcs, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) == cluster.num_cpus != os.cpu_count()


def _ray_version() -> str:
    from importlib.metadata import version

    return version("ray")
