"""Sources on S3: a real server process (moto) on loopback, endpoint and credentials from the environment."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import videoflow
from tests.jobs import run_job
from videoflow.errors import SourceError
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.testing import make_barcode_video

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}})
SECRET = "very-secret-key"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket with two videos, a copy of one of them and a text file."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        _wait(port)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        fs = s3fs.S3FileSystem()
        fs.mkdir("films")
        for i in range(2):
            fs.put_file(
                str(make_barcode_video(tmp_path / f"{i}.mp4", num_frames=60, offset=i * 100)), f"films/a b/{i}.mp4"
            )
        fs.copy("films/a b/0.mp4", "films/copy.mp4")
        fs.pipe_file("films/notes.txt", b"words")
        yield "s3://films"
    finally:
        server.terminate()
        server.wait(20)


def _wait(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server did not start")


def test_a_bucket_is_a_source_like_a_folder(bucket: str, tmp_path: Path) -> None:
    found = scan([bucket])
    assert [f.uri for f in found.files] == ["s3://films/a b/0.mp4", "s3://films/a b/1.mp4", "s3://films/copy.mp4"]
    assert found.ignored == ("s3://films/notes.txt",)
    assert [f.uri for f in scan([f"{bucket}/*.mp4"]).files] == ["s3://films/copy.mp4"]
    with pytest.raises(SourceError, match=r"does not exist|holds no files"):
        scan([f"{bucket}/nothing/here"])

    root = tmp_path / "cat"
    first = run_job(RECIPE, [bucket], root)
    assert (first.videos, first.done, first.duplicates, first.decoded_videos, first.clips) == (2, 2, 1, 2, 4)
    uris = set(videoflow.open(str(root)).version("x").clips()["uri"].to_pylist())
    assert uris == {"s3://films/a b/0.mp4", "s3://films/a b/1.mp4"}
    again = run_job(RECIPE, [bucket], root)
    assert (again.decoded_videos, again.version) == (0, first.version)

    local = run_job(RECIPE, [tmp_path / "0.mp4"], root, name="same")  # the same bytes by another name
    assert local.decoded_videos == 0


def test_manifest_rows_may_lie_on_s3_and_secrets_stay_out(bucket: str, tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    rows = [{"uri": "s3://films/a b/1.mp4", "start": "0.5", "end": "1.0"}, {"uri": "s3://films/gone.mp4"}]
    manifest.write_text("\n".join(json.dumps(r) for r in rows))
    root = tmp_path / "cat"
    summary = run_job(RECIPE, [manifest], root)
    assert (summary.videos, summary.done, summary.quarantined, summary.clips) == (2, 1, 1, 1)
    (bad,) = videoflow.open(str(root)).quarantine()
    assert (bad["uri"], bad["class"]) == ("s3://films/gone.mp4", "io_error")
    for path in root.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
