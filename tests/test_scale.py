"""What must stay small when a catalog grows: sources opened by a second run, bytes in Ray's object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.opens import Opens
from benchmarks.synthetic import tiny_videos

ROOT = Path(__file__).resolve().parent.parent


def side(*arguments: str | Path) -> Any:
    """A step of the benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale_side", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_run_opens_no_source(tmp_path: Path) -> None:
    folder = tiny_videos(tmp_path / "videos", 5)
    first = side("run", folder, tmp_path / "cat")
    assert (first["decodes"], first["opened"]) == (5, 5)  # the watch does see what is opened
    second = side("run", folder, tmp_path / "cat")
    assert (second["decodes"], second["opened"], second["clips"]) == (0, 0, first["clips"])


def test_the_watch_sees_openings_from_other_processes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with Opens(tmp_path) as opens:
        os.stat(tmp_path / "a")
        os.listdir(tmp_path)
        subprocess.run(["cat", str(tmp_path / "b")], check=True, capture_output=True)
    assert opens.names == ["b"]


@pytest.mark.timeout(600)
def test_rays_object_store_does_not_grow_with_the_video(tmp_path: Path) -> None:
    folders = []
    for seconds in (2, 20):
        folder = tmp_path / f"{seconds}"
        folder.mkdir()
        command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", f"testsrc2=s=640x360:r=24:d={seconds}"]
        subprocess.run([*command, "-pix_fmt", "yuv420p", str(folder / "v.mp4")], check=True)
        folders.append(folder)
    short, long = side("ray", *folders, tmp_path / "cat")
    assert (short["frames"], long["frames"]) == (48, 480)
    more = long["cached_bytes"] - short["cached_bytes"]
    assert more > 1_000_000  # so much more was cached; what is said of it is no part of it
    assert long["created_bytes"] - short["created_bytes"] < more / 50
    assert long["peak_bytes"] - short["peak_bytes"] < more / 50
