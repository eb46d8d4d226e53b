"""`submit` as scripts meet it: what is refused before anything is sent, and following through faults of the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http_server import Answer as Reply
from tests.http_server import Server
from videoflow.cli import submit
from videoflow.jobs import CONFIG_VARIABLE
from videoflow.testing import make_barcode_video

CHEAP = "stages: {frames: {}, shots: {detector: hsv}, clips: {by: windows, window_seconds: 1}}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(CHEAP)
    return tmp_path / "r.yaml"


def args(recipe: Path, *more: object) -> list[object]:
    return ["submit", recipe, "--source", "s3://b/in", "--root", "s3://b/cat", "--name", "x", *more]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "no cluster: give --address http://head:8265"),
        ({5: "cat", "--address": "h:1"}, "means nothing to the cluster"),
        ({3: "videos", "--address": "h:1"}, "means nothing to the cluster"),
        ({7: "a/b", "--address": "h:1"}, "version name"),
        ({1: "nowhere.yaml", "--address": "h:1"}, "no recipe file"),
        ({"--set": "frames.fpss=1", "--address": "h:1"}, "unknown key stages.frames.fpss"),
        ({"--engine": "spark", "--address": "h:1"}, "unknown engine"),
        ({"--memory": "much", "--address": "h:1"}, "--memory 'much'"),
        ({"--max-quarantined": "all", "--address": "h:1"}, "--max-quarantined 'all'"),
        ({"--with": "/nowhere/x.py", "--address": "h:1"}, "no such file or folder"),
        ({"--address": "ray://h:10001"}, "give the cluster's dashboard"),
    ],
)
def test_wrong_input_is_one_line_and_2(call, recipe: Path, monkeypatch: pytest.MonkeyPatch, change: dict, says: str) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # what nodes join by: no dashboard
    given = args(recipe)
    for key, value in change.items():
        if isinstance(key, int):
            given[key] = value
        else:
            given += [key, value]
    answer = call(*given)
    assert answer.code == 2 and says in answer.err and len(answer.err.strip().splitlines()) == 1
    assert answer.out == ""


class Dashboard:
    """Answers as Ray Jobs do, or as told: one entry of ``course`` each time it is asked how a job is."""

    def __init__(self, server: Server, course: list[Reply | dict]) -> None:
        self.course, self.log = course, ""
        server.answer = self.answer

    def answer(self, method: str, path: str) -> Reply:
        if path == "/api/version":
            return 200, {}, b'{"ray_version": "2.60.0"}'
        if method in ("PUT", "POST") or path.startswith("/api/packages/"):
            return 200, {}, b"{}"
        if path.endswith("/logs"):
            return 200, {}, json.dumps({"logs": self.log}).encode()
        now = self.course.pop(0) if len(self.course) > 1 else self.course[0]
        if isinstance(now, tuple):
            return now
        self.log += now.pop("says", "")
        return 200, {}, json.dumps(now).encode()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(submit, "MAX_SILENT_POLLS", 5)


def test_following_outlasts_a_cluster_that_stumbles(call, recipe: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def] # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", server.url)
    course = [
        {"status": "PENDING", "says": "set up\n"},
        (503, {}, b"starting"),
        (0, {}, b""),
        (500, {}, b"no"),
        {"status": "RUNNING", "says": "half "},
        {"status": "RUNNING", "says": "a line\n"},
        {"status": "SUCCEEDED", "driver_exit_code": 0, "says": 'done\n{"job": "j", "clips": 5}\n{"other": 1}\n'},
    ]
    Dashboard(server, [*course])
    answer = call(*args(recipe, "--follow"))
    assert answer.code == 0
    assert answer.out.endswith('set up\nhalf a line\ndone\n{"job": "j", "clips": 5}\n{"other": 1}\n')
    post = next(json.loads(body) for method, path, _, body in server.asked if (method, path) == ("POST", "/api/jobs/"))
    assert post["entrypoint"].endswith("--name x --engine ray --max-quarantined 10%")
    assert post["runtime_env"]["working_dir"].startswith("gcs://_ray_pkg_")


def test_json_of_a_followed_job_ends_with_its_own(call, recipe: Path, server: Server) -> None:  # type: ignore[no-untyped-def]
    ended = {"status": "FAILED", "driver_exit_code": 3, "says": 'x\n{"job": "j", "clips": 5}\n{"other": 1}\nbye\n'}
    Dashboard(server, [ended])
    answer = call(*args(recipe, "--follow", "--json", "--address", server.url))
    assert answer.code == 3 and answer.rows[1] == {"job": "j", "clips": 5} and len(answer.rows) == 2
    assert set(answer.rows[0]) == {"job", "submission", "address", "root"} and "bye\n" in answer.err


ENDS: list[tuple[Reply | dict, int, str]] = [
    ({"status": "STOPPED"}, 130, ""),
    ({"status": "FAILED", "driver_exit_code": 2}, 2, ""),
    ({"status": "FAILED", "driver_exit_code": 137, "message": "a\nkilled"}, 4, "as videoflow does: failed: killed"),
    (
        {"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "no disk"},
        4,
        "setup failure: no disk",
    ),
    ((404, {}, b""), 4, "no longer knows job"),
    ((503, {}, b"gone"), 4, "answers 503: gone"),
]


@pytest.mark.parametrize("case", ENDS)
def test_followers_end_as_the_job_does(call, recipe: Path, server: Server, case: tuple) -> None:  # type: ignore[no-untyped-def]
    ends, code, says = case
    Dashboard(server, [ends])
    answer = call(*args(recipe, "--wait", "--address", server.url))
    assert answer.code == code and says in answer.err and "Traceback" not in answer.err


def test_a_cluster_that_is_not_there_is_4(call, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    answer = call(*args(recipe, "--address", "http://127.0.0.1:9"))
    assert answer.code == 4 and "cannot reach a Ray dashboard at http://127.0.0.1:9" in answer.err


# -- on the other side -----------------------------------------------------------------------------------------------


def test_a_run_in_a_submission_has_its_id_once(call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=30)
    config = {"metadata": {"job_submission_id": "sub-1", "videoflow_job": "20260101T000000-abcdef"}}
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(config))
    where = ["--source", tmp_path / "in", "--root", tmp_path / "cat", "--name", "x", "--engine", "local", "--json"]
    ids = [call("run", recipe, *where).rows[-1]["job"] for _ in range(2)]
    assert ids[0] == "20260101T000000-abcdef" != ids[1]
    assert [r["submission"] for r in call("jobs", tmp_path / "cat", "--json").rows] == ["sub-1", "sub-1"]


def test_run_on_ray_refuses_a_dashboard(call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=30)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    answer = call("run", recipe, "--source", tmp_path / "in", "--root", tmp_path / "cat", "--name", "x")
    assert answer.code == 2 and "give it to `videoflow submit --address`" in answer.err.splitlines()[-1]
