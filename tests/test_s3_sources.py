"""Sources on S3: a real server process (moto) on loopback, endpoint and credentials from the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

import videoflow
from tests.jobs import run_job
from tests.s3_server import SECRET, moto_server, use
from videoflow.errors import SourceError
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.testing import make_barcode_video

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}})


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket with two videos, a copy of one of them and a text file."""
    with moto_server() as server:
        use(server, monkeypatch)
        fs = s3fs.S3FileSystem()
        fs.mkdir("films")
        for i in range(2):
            fs.put_file(
                str(make_barcode_video(tmp_path / f"{i}.mp4", num_frames=60, offset=i * 100)), f"films/a b/{i}.mp4"
            )
        fs.copy("films/a b/0.mp4", "films/copy.mp4")
        fs.pipe_file("films/notes.txt", b"words")
        yield "s3://films"


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
