"""Jobs as records in the catalog: listed, followed, cancelled and resumed from other processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Quiet, run_job
from tests.test_job import facts, item_rows
from videoflow import jobrecord
from videoflow.errors import JobCancelled, QueryError
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.recipe import Recipe
from videoflow.store.layout import Root
from videoflow.testing import make_barcode_video
from videoflow.unit import UnitReport

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}})
#: A run that takes its time for every video after the first, and is quick to hear.
SLOW = """
import time
import videoflow.jobrecord as jobrecord
import workers.run_unit as run_unit
jobrecord.HEARTBEAT_SECONDS = 0.2
real, calls = run_unit.UnitRunner._decode_one, []

def slow(self, *args):
    calls.append(1)
    until = time.monotonic() + (30 if len(calls) > 1 else 0)
    while time.monotonic() < until and not self._cancelled:
        time.sleep(0.05)
    return real(self, *args)

run_unit.UnitRunner._decode_one = slow
from videoflow.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    for i in range(4):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=45, offset=100 * i)
    return folder


@pytest.fixture(scope="module")
def undisturbed(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "cat"
    run_job(RECIPE, [videos], root, workers=1)
    return root


@pytest.fixture
def slow_run(videos: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path, str]]:
    """A run in another process, after its first commit: (process, root, job)."""
    root, recipe = tmp_path / "cat", tmp_path / "r.yaml"
    recipe.write_text(json.dumps(RECIPE.model_dump(mode="json")))
    where = os.path.relpath(videos, tmp_path)  # a relative source: its record must mean the same from elsewhere
    args = ["run", "r.yaml", "--source", where, "--root", "cat", "--name", "x", "--engine", "local", "--workers", "1"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *args], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while not (done := [j for j in (jobs_of(root) if root.exists() else []) if j["decoded"]]):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.05)
        yield process, root, done[0]["job"]
    finally:
        process.kill()
        process.communicate()


def jobs_of(root: Path) -> list[dict[str, Any]]:
    records = [json.loads(p.read_text() or "{}") for p in sorted((root / "jobs").glob("*.json"))]
    return [{**r, "decoded": r.get("stages", {}).get("decode", {}).get("done", 0)} for r in records]


def cli(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "videoflow.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_jobs_status_and_logs_of_a_finished_job(undisturbed: Path) -> None:
    (job,) = (json.loads(line) for line in cli("jobs", undisturbed, "--json").stdout.splitlines())
    assert (job["state"], job["name"], job["version"], job["recipe"]) == ("finished", "x", "x@1", "recipe")
    status = json.loads(cli("status", undisturbed, job["job"][:-3], "--json", "-f").stdout)
    assert status["job"] == job["job"] and status["state"] == "finished"
    assert {k: (v["done"], v["total"]) for k, v in status["stages"].items()} == {
        "sources": (4, 4),
        "decode": (4, 4),
        "clips": (4, 4),
    }
    assert (status["summary"]["done"], status["pid"], status["host"]) == (4, os.getpid(), socket.gethostname())
    log = cli("logs", undisturbed, job["job"]).stdout
    assert "decode: begins, 4 videos" in log and "decode: ends, 4 of 4 videos, 180 frames decoded" in log
    assert log.splitlines()[-1].endswith("finished")
    for command in ("jobs", "status", "logs"):
        text = cli(command, undisturbed, *([] if command == "jobs" else [job["job"]]))
        assert text.returncode == 0 and "finished" in text.stdout
    for args, says in (
        (("status", undisturbed, "nothing"), "no job 'nothing'"),
        (("cancel", undisturbed, job["job"]), "not running"),
        (("jobs", undisturbed.parent), "no catalog"),
    ):
        wrong = cli(*args)
        assert wrong.returncode == 2 and says in wrong.stderr and len(wrong.stderr.strip().splitlines()) == 1


@pytest.mark.timeout(280)
def test_cancel_and_resume_from_other_processes(slow_run, undisturbed: Path) -> None:  # type: ignore[no-untyped-def]
    process, root, job = slow_run
    (told,) = (json.loads(line) for line in cli("jobs", root, "--json").stdout.splitlines())
    assert (told["state"], told["stage"], told["pid"]) == ("running", "decode", process.pid)
    refused = cli("resume", root, job)
    assert refused.returncode == 2 and "is running" in refused.stderr
    asked = cli("cancel", root, job)
    assert asked.returncode == 0 and job in asked.stdout
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"job {job} was cancelled; `videoflow resume" in said.splitlines()[-1] and "Traceback" not in said
    (record,) = jobs_of(root)
    assert (record["state"], record["error"]) == ("cancelled", "asked to stop")
    assert not (root / "jobs" / f"{job}.cancel").exists()
    assert "cancelled: asked to stop" in cli("logs", root, job).stdout

    done = cli("resume", root, job, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["done"], result["version"], result["pending"]) == (4, "x@1", 0) and result["decoded_videos"] < 4
    assert facts(root) == facts(undisturbed) and item_rows(root) == item_rows(undisturbed)
    assert [(j["state"], j["resumes"]) for j in jobs_of(root)] == [("cancelled", None), ("finished", job)]


@pytest.mark.timeout(280)
def test_a_killed_job_is_lost_and_can_be_resumed(slow_run, undisturbed: Path) -> None:  # type: ignore[no-untyped-def]
    process, root, job = slow_run
    following = subprocess.Popen(
        [sys.executable, "-m", "videoflow.cli.main", "status", str(root), job, "-f", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout and json.loads(following.stdout.readline())["state"] == "running"
    process.send_signal(signal.SIGKILL)
    rest, _ = following.communicate(timeout=60)
    assert json.loads(rest.splitlines()[-1])["state"] == "lost"
    assert "lost" in cli("jobs", root).stdout and cli("cancel", root, job).returncode == 2
    assert cli("resume", root, job).returncode == 0
    assert facts(root) == facts(undisturbed) and item_rows(root) == item_rows(undisturbed)


def test_a_job_in_a_thread_is_cancelled_at_its_next_report(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(jobrecord, "HEARTBEAT_SECONDS", 0.05)
    root = Root.at(tmp_path / "cat")

    class Cancelling(Quiet):
        def advance(self, stage: str, report: UnitReport) -> None:
            (job,) = (tmp_path / "cat" / "jobs").glob("*.json")
            root.put(f"jobs/{job.stem}.cancel", b"")
            time.sleep(0.5)

    job = Job(RECIPE, [str(videos)], root=root.url, name="x", options=JobOptions("local", 1), progress=Cancelling())
    raised: list[BaseException] = []

    def work() -> None:
        try:
            job.run()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [type(e) for e in raised] == [JobCancelled]
    assert jobrecord.find_job(root, job.id)["state"] == "cancelled"


def record_of(**changes: object) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat()
    return {"job": "j", "state": "running", "started": now, "heartbeat": now, **jobrecord._process(), **changes}


def test_states_as_they_are_now() -> None:
    old = (datetime.now(UTC) - timedelta(seconds=90)).isoformat()
    assert jobrecord.state_now(record_of()) == "running"
    assert jobrecord.state_now(record_of(heartbeat=old)) == "running"  # silent, but its process is there
    assert jobrecord.state_now(record_of(process_started="1")) == "lost"  # another process has its number
    assert jobrecord.state_now(record_of(host="elsewhere")) == "running"
    assert jobrecord.state_now(record_of(host="elsewhere", heartbeat=old)) == "lost"
    assert jobrecord.state_now(record_of(state="stopped", heartbeat=old)) == "stopped"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert jobrecord.state_now(record_of(pid=child.pid)) == "lost"
    assert jobrecord.state_now({"job": "j", "state": "running", "started": old}) == "lost"  # before there were beats


def test_credentials_are_not_stored_and_such_a_job_is_not_resumed(tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"sources": ("https://me:secret@host/v.mp4",)})
    sources = [*recipe.sources, "s3://bucket/v?token=secret", "relative/folder"]
    record = {"job": "j", **jobrecord.describe(recipe, sources, "x", JobOptions("local"))}
    assert "secret" not in json.dumps(record) and "secret" not in json.dumps(jobrecord.shown_recipe(recipe))
    assert record["sources"] == ["https://host/v.mp4", "s3://bucket/v", str(Path.cwd() / "relative/folder")]
    with pytest.raises(QueryError, match="not stored") as refused:
        jobrecord.asked(record)
    assert "https://host/v.mp4, s3://bucket/v" in str(refused.value) and "secret" not in str(refused.value)
    record["masked_sources"] = []
    again, where, name, options = jobrecord.asked(json.loads(json.dumps(record)))
    assert (again.stages, where, name, options) == (RECIPE.stages, record["sources"], "x", JobOptions("local"))


def test_a_heartbeat_that_fails_does_not_stop_the_work(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from videoflow.errors import SystemFailure

    monkeypatch.setattr(jobrecord, "HEARTBEAT_SECONDS", 0.02)
    real, failed = Root.has, []

    def has(self: Root, path: str) -> bool:
        if path.endswith(".cancel"):
            failed.append(path)
            raise SystemFailure("cannot look up: reset by peer")
        return real(self, path)

    monkeypatch.setattr(Root, "has", has)
    assert run_job(RECIPE, [videos / "v0.mp4"], tmp_path / "cat", workers=1).done == 1
    assert failed and jobs_of(tmp_path / "cat")[0]["state"] == "finished"
