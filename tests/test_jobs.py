"""The HTTP client of Ray Jobs against servers that misbehave; against a real cluster: test_submit_ray.py."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.http_server import Answer, Server
from videoflow import jobs
from videoflow.errors import ClusterError, SystemFailure
from videoflow.jobs import CONFIG_VARIABLE, RayJobs, check_address, exit_code, find_token, submitted, why_failed


def test_a_version_is_what_makes_a_dashboard(server: Server) -> None:
    server.always(200, json.dumps({"version": "4", "ray_version": "2.60.0"}).encode())
    assert RayJobs(server.url + "/").version() == "2.60.0"
    assert server.asked[0][:2] == ("GET", "/api/version")
    for code, body in ((404, b""), (200, b"<html>hello</html>"), (200, b"[1]"), (200, b"{}")):
        server.always(code, body)
        with pytest.raises(ClusterError, match="is no Ray dashboard"):
            RayJobs(server.url).version()


def test_refusals_say_what_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.always(401, b"Unauthorized")
    with pytest.raises(ClusterError, match=r"asks for a token \(401\): set RAY_AUTH_TOKEN"):
        RayJobs(server.url).version()
    server.always(403, b"Forbidden")
    with pytest.raises(ClusterError, match="no token was sent"):
        RayJobs(server.url).version()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    with pytest.raises(ClusterError, match="token in RAY_AUTH_TOKEN is not this cluster's") as e:
        RayJobs(server.url).version()
    assert "s3cret" not in str(e.value)
    assert server.asked[-1][2]["Authorization"] == "Bearer s3cret"
    server.always(400, b"Traceback\n  File x\nValueError: submission_id is taken\n\n")
    with pytest.raises(ClusterError, match=r"answers 400: ValueError: submission_id is taken$"):
        RayJobs(server.url).info("x")
    server.always(503, b"")
    with pytest.raises(SystemFailure, match="answers 503: Service Unavailable"):
        RayJobs(server.url).info("x")


def test_a_redirect_is_not_followed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token would go along with it."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    other = Server()
    other.always(200, b'{"ray_version": "2.60.0"}')
    server.always(302, Location=f"{other.url}/login?next=secret")
    with pytest.raises(ClusterError, match="stands behind a login") as e:
        RayJobs(server.url).version()
    other.server.shutdown()
    other.server.server_close()
    assert other.asked == [] and "next=secret" not in str(e.value)


def test_what_cannot_be_reached_is_the_systems_failure(server: Server) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(SystemFailure, match=rf"cannot reach a Ray dashboard at {nobody}: .*refused"):
        RayJobs(nobody).version()
    server.always(0)
    with pytest.raises(SystemFailure, match="hung up without an answer"):
        RayJobs(server.url).version()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SystemFailure, match="timed out"):
            RayJobs(address, timeout_seconds=0.2).version()


def test_a_port_that_speaks_something_else(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ClusterError, match="is no Ray dashboard"):
            RayJobs(f"http://127.0.0.1:{other.getsockname()[1]}").version()


def test_a_package_is_sent_once(server: Server) -> None:
    there: set[str] = set()

    def answer(method: str, path: str) -> Answer:
        if method == "PUT":
            there.add(path)
        return (200 if path in there else 404), {}, b""

    server.answer = answer
    for _ in range(2):
        assert RayJobs(server.url).upload("abc", b"zip") == "gcs://_ray_pkg_abc.zip"
    assert [(m, p, b) for m, p, _, b in server.asked] == [
        ("GET", "/api/packages/gcs/_ray_pkg_abc.zip", b""),
        ("PUT", "/api/packages/gcs/_ray_pkg_abc.zip", b"zip"),
        ("GET", "/api/packages/gcs/_ray_pkg_abc.zip", b""),
    ]


def test_a_lost_answer_is_no_second_submission(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.01)

    def answer(method: str, path: str) -> Answer:
        return (0, {}, b"") if method == "POST" else (200, {}, b'{"status": "PENDING"}')

    server.answer = answer
    RayJobs(server.url).submit("true", submission="j", working_dir="gcs://x.zip", metadata={"a": "b"})
    assert [m for m, *_ in server.asked] == ["POST", "GET"]
    assert json.loads(server.asked[0][3]) == {
        "entrypoint": "true",
        "submission_id": "j",
        "runtime_env": {"working_dir": "gcs://x.zip"},
        "metadata": {"a": "b"},
    }
    server.answer = lambda method, path: (0 if method == "POST" else 404, {}, b"")
    server.asked.clear()
    with pytest.raises(SystemFailure, match="hung up"):
        RayJobs(server.url).submit("true", submission="j", working_dir="gcs://x.zip", metadata={})
    assert [m for m, *_ in server.asked] == ["POST", "GET"] * jobs.SUBMIT_TRIES


def test_a_cluster_that_is_starting_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.01)
    course = [(500, {}, b"No available agent to submit job"), (404, {}, b""), (200, {}, b"{}")]
    server.answer = lambda method, path: course.pop(0)
    RayJobs(server.url).submit("true", submission="j", working_dir="gcs://x.zip", metadata={})
    assert course == []


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://x.org/ray", "https://x.org/ray"),
    ],
)
def test_addresses(given: str, full: str) -> None:
    assert check_address(given) == full


@pytest.mark.parametrize("given", ["ray://head:10001", "http://", "ftp://head", "http://user:pw@head:8265", "http://h/?token=pw"])  # fmt: skip
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ClusterError) as e:
        check_address(given)
    assert "pw" not in str(e.value)


def test_a_token_is_looked_for_where_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_token({}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert find_token({}) == ("home", str(tmp_path / ".ray" / "auth_token"))
    (tmp_path / "named").write_text(" named ")
    both = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "named"), "RAY_AUTH_TOKEN": "direct"}
    assert find_token(both) == ("direct", "RAY_AUTH_TOKEN")
    assert find_token({**both, "RAY_AUTH_TOKEN": ""}) == ("named", str(tmp_path / "named"))
    assert find_token({**both, "RAY_AUTH_MODE": "disabled"}) is None
    with pytest.raises(ClusterError, match="cannot be read"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")})
    (tmp_path / "empty").touch()
    with pytest.raises(ClusterError, match="is empty"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "empty")})


def test_exit_codes() -> None:
    def code(status: str, driver: int | None = None) -> int:
        return exit_code({"status": status, "driver_exit_code": driver})

    assert [code("SUCCEEDED", 0), code("STOPPED"), code("FAILED", None), code("FAILED", 127), code("FAILED", -9)] == [0, 130, 4, 4, 4]  # fmt: skip
    assert [code("FAILED", c) for c in (2, 3, 4, 130)] == [2, 3, 4, 130]
    failed = {"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "a\n  it was b \n\n"}
    assert why_failed(failed) == "runtime env setup failure: it was b"


def test_a_process_knows_what_it_was_submitted_as() -> None:
    assert submitted({}) is None
    assert submitted({CONFIG_VARIABLE: "nonsense"}) is None
    assert submitted({CONFIG_VARIABLE: '{"runtime_env": {}}'}) is None
    config = {"metadata": {"job_submission_id": "raysubmit_1", "videoflow_job": "j"}}
    us = submitted({CONFIG_VARIABLE: json.dumps(config)})
    assert us is not None and (us.submission, us.job) == ("raysubmit_1", "j")
    del config["metadata"]["videoflow_job"]
    us = submitted({CONFIG_VARIABLE: json.dumps(config)})
    assert us is not None and us.job is None
