"""benchmarks/nvdec_check.py is run once, on a machine that is not here: with the stand-in it must get to its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import nvdec_check
from tests import fake_gpu
from workers import nvdec
from workers.nvdec import CLIPS, check_gpu


def with_stand_in(monkeypatch: pytest.MonkeyPatch, fault: fake_gpu.Fault | None) -> None:
    check_gpu.cache_clear()
    monkeypatch.setattr(nvdec_check, "gpu", lambda: None)
    for module in (nvdec, nvdec_check):
        monkeypatch.setattr(module, "open_on_gpu", fake_gpu.opener(fault))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copy(CLIPS / "h264_full.mp4", tmp_path / "a.mp4")
    (tmp_path / "b.mp4").touch()
    return tmp_path


def test_all_steps_are_measured(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    with_stand_in(monkeypatch, None)
    result = nvdec_check.measure(source)
    assert result["holds"] and result["believed"] is True and "not_done" not in result
    assert result["clips"]["equal"] == 11 and not result["clips"]["differ"]
    assert result["videos"] == {"equal": 1, "differ": {}, "left_to_cpu": {"unusable: empty": 1}}
    for what in ("decode", "pass"):
        rates = result["speed"][what]["frames_per_second"]
        assert rates["cpu"] > 0 and rates["nvdec"] > 0


def test_a_gpu_that_is_wrong_does_not_hold(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    with_stand_in(monkeypatch, fake_gpu.darker)
    result = nvdec_check.measure(source)
    assert not result["holds"] and "cannot be believed" in result["believed"]
    assert result["videos"]["equal"] == 0 and 64 <= result["videos"]["differ"]["a.mp4"] <= 128
    check_gpu.cache_clear()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_could_not_do(source: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.nvdec_check", "--source", str(source), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    assert done.returncode == 3
    assert json.loads(done.stdout.splitlines()[-1])["not_done"] == list(nvdec_check.STEPS)
