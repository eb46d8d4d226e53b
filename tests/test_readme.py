"""The README's code runs: its bash and python blocks, in order, in one folder with a few small videos.

By rule, bash blocks of `make …` lines are not run here (CI runs those commands itself); their targets must exist.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from videoflow.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_QUARANTINED, EXIT_SYSTEM, QUARANTINE_CLASSES

REPO = Path(__file__).parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line``: where it starts in the README."""

    language: str
    text: str
    line: int

    @property
    def is_make(self) -> bool:
        return self.language == "bash" and all(t.startswith("make ") for t in self.text.splitlines() if t.strip())


BLOCKS = [Block(m[1], m[2], README.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(README)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with videos/: three small films with a moving pattern, a cut in the middle of each."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "videos").mkdir()
    for i, (first, second) in enumerate(
        [("testsrc2", "mandelbrot"), ("smptebars", "testsrc2"), ("mandelbrot", "rgbtestsrc")]
    ):
        sources = [f"{name}=size=320x180:rate=24,trim=duration=2,format=yuv420p" for name in (first, second)]
        command = ["ffmpeg", "-v", "error", "-threads", "1"]
        for source in sources:
            command += ["-f", "lavfi", "-i", source]
        command += ["-filter_complex", "[0][1]concat=n=2", "-c:v", "libx264", "-preset", "veryfast", "-threads", "1"]
        subprocess.run([*command, str(folder / "videos" / f"film_{i}.mp4")], check=True)
    return folder


def test_blocks_are_of_known_kinds() -> None:
    assert {b.language for b in BLOCKS} == {"bash", "python", "text"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(b.text for b in BLOCKS if b.is_make)))
    named |= set(re.findall(r"`make ([a-z-]+)", README))
    assert named
    assert named <= targets


def test_trainer_example_is_short() -> None:
    trainer = next(b for b in BLOCKS if b.language == "python")
    assert len(trainer.text.strip().splitlines()) <= 15


def test_tables_name_every_class_and_exit_code() -> None:
    for name, meaning in QUARANTINE_CLASSES.items():
        assert f"| `{name}` | {meaning} |" in README
    for code in (EXIT_OK, EXIT_INPUT, EXIT_QUARANTINED, EXIT_SYSTEM, EXIT_INTERRUPTED):
        assert f"\n| {code} | " in README


@pytest.mark.timeout(600)
def test_code_blocks_run_in_order(folder: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = 0
    for block in BLOCKS:
        if block.language == "text" or block.is_make:
            continue
        command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        done = subprocess.run([*command, block.text], cwd=folder, env=env, capture_output=True, text=True, check=False)
        said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == 0, f"README.md:{block.line} ended with {done.returncode}\n{block.text}\n{said}"
        ran += 1
    assert ran >= 5
