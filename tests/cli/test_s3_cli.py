"""Every command on a catalog that lies on S3."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import videoflow
from tests.cli.test_jobs_cli import SLOW
from tests.s3_server import Server, make_bucket, moto_server, use
from videoflow.testing import make_barcode_video

ROOT = "s3://catalogs/cat"
STAGES = {
    "frames": {"short_side": 32},
    "shots": {"detector": "hsv"},
    "clips": {"by": "windows", "window_seconds": 1},
    "colour": {"use": "tests.cli.scorer:MeanColour"},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with moto_server() as server:
        use(server, monkeypatch)
        make_bucket("catalogs")
        yield server


@pytest.mark.timeout(600)
def test_every_command_works_on_a_bucket(server: Server, tmp_path: Path, call) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "in").mkdir()
    for i in range(3):
        make_barcode_video(tmp_path / "in" / f"{i}.mp4", num_frames=45, offset=100 * i)
    (tmp_path / "in" / "bad.mp4").write_text("no video")
    (tmp_path / "r.yaml").write_text(json.dumps({"stages": STAGES}))
    where = [tmp_path / "r.yaml", "--source", tmp_path / "in", "--root", ROOT, "--name", "x"]
    options = ["--engine", "local", "--workers", "1"]

    planned = call("plan", *where, "--json")
    assert (planned.code, planned.rows[-1]["to_decode"]) == (0, 4)
    assert call("versions", ROOT).code == 2  # planning makes no catalog

    command = [sys.executable, "-c", SLOW, "run", *map(str, [*where, *options])]
    slow = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=server.full_environ())
    deadline = time.monotonic() + 200
    done = 0
    while not done:
        assert time.monotonic() < deadline and slow.poll() is None
        time.sleep(0.3)
        stages = [call("status", ROOT, j["job"], "--json").rows[0]["stages"] for j in _jobs(call)]
        done = sum(s.get("decode", {}).get("done", 0) for s in stages)
    (job,) = [j["job"] for j in _jobs(call)]
    assert "running" in call("status", ROOT, job).out
    assert call("cancel", ROOT, job).code == 0
    assert "was cancelled" in slow.communicate(timeout=100)[1] and slow.returncode == 130
    assert _jobs(call)[0]["state"] == "cancelled"

    resumed = call("resume", ROOT, job, "--json")
    summary = resumed.rows[-1]
    assert (resumed.code, summary["done"], summary["quarantined"], summary["pending"]) == (0, 3, 1, 0)
    assert summary["decoded_videos"] < 4
    assert [j["state"] for j in _jobs(call)] == ["cancelled", "finished"]
    assert call("versions", ROOT, "--json").rows[0]["clips"] == 6
    again = call("plan", *where, "--json").rows[-1]
    assert again["to_decode"] == 0 and all(s["to_compute"] == 0 for s in again["stages"])

    (count,) = call("query", ROOT, "x", "SELECT count(*) AS n FROM clips", "--json").rows
    assert count["n"] == 6
    key = call("query", ROOT, "x", "SELECT clip_key FROM clips LIMIT 1", "--json").rows[0]["clip_key"]
    assert len(call("search", ROOT, "x", "--clip", key, "-k", "3", "--json").rows) == 3
    assert "cached" in call("explain", ROOT, key, "--recipe", tmp_path / "r.yaml").out
    assert "bad.mp4" in call("quarantine", "list", ROOT).out
    assert call("quarantine", "retry", ROOT, "--class", "not_video").code == 0
    assert call("plan", *where, "--json").rows[-1]["to_decode"] == 1

    before = call("du", ROOT, "--json").rows[-1]
    dry = call("gc", ROOT, "--grace", "0", "--dry-run", "--json").rows[-1]
    assert dry["removed"] is False and dry["manifest"] > 0
    assert call("du", ROOT, "--json").rows[-1]["bytes"] == before["bytes"]
    swept = call("gc", ROOT, "--grace", "0", "--json").rows[-1]
    assert (swept["removed"], swept["manifest"]) == (True, dry["manifest"])
    assert call("du", ROOT, "--json").rows[-1]["bytes"] == before["bytes"] - swept["bytes"]

    version = videoflow.open(ROOT).version("x@1")
    with version.loader(batch_size=2, frames=4, fps=4, size=32, epochs=1, tail="pad", columns=("embedding",)) as loader:
        batches = list(loader)
    assert sum(int(b["valid"].sum()) for b in batches) == 6 and batches[0]["embedding"].shape == (2, 3)


def _jobs(call) -> list[dict]:  # type: ignore[no-untyped-def]
    answer = call("jobs", ROOT, "--json")
    return answer.rows if answer.code == 0 else []
