"""What bad files cost a job: good videos alone, and the same ones among files that are broken, hang the decoder, crash
it or allocate without end.

    python -m benchmarks.poison [--quick] [--json]

Both jobs run in turns on the local engine with two workers and the limits that every job has (a deadline of two minutes
on the next frame, 4 GiB). The time of the second may be 1.3 × that of the first, and one deadline. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from rich.console import Console
from rich.table import Table

import videoflow
from benchmarks import footage
from benchmarks.scale_side import Silent
from videoflow.execute import JobOptions, JobSummary
from videoflow.job import Job
from videoflow.recipe import Recipe
from videoflow.stage import PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary
from videoflow.store.schemas import ARTIFACT_HEAD
from videoflow.testing import misbehave
from workers.sandbox import DEADLINE_SECONDS

FACTOR = 1.3
#: Frames of the videos that are poison, and what each does to the process that decodes it.
POISON = {31: "hang", 37: "crash", 41: "allocate"}
EXPECTED = {"hang": "timeout", "crash": "crash", "allocate": "out_of_memory"}


class Poison(PassConsumer):
    """What a broken decoder does, at the last frame of a video of a certain number of frames."""

    name: ClassVar[str] = "poison"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "poison"

    def schema(self) -> pa.Schema:
        return pa.schema(ARTIFACT_HEAD)

    def begin(self, video: VideoHeader) -> None:
        self._seen = 0

    def see(self, frame: ShownFrame) -> None:
        self._seen += 1

    def finish(self, summary: VideoSummary) -> Product:
        if self._seen in POISON:
            misbehave(POISON[self._seen])
        return Product(digest="0" * 32)


def recipe() -> Recipe:
    stages: dict[str, dict[str, Any]] = {
        "frames": {},
        "poison": {"use": "benchmarks.poison:Poison"},
        "shots": {"detector": "hsv"},
        "clips": {"min_seconds": 0.1},
    }
    return Recipe(name="poison", stages=stages)


def good_videos(folder: Path, count: int, source: Path) -> None:
    """So many contents of the same pictures: an MP4 may end with a box that nobody reads."""
    folder.mkdir(parents=True)
    data = source.read_bytes()
    for i in range(count):
        (folder / f"good{i:03d}.mp4").write_bytes(data + b"\x00\x00\x00\x10free" + i.to_bytes(8, "big"))


def bad_files(folder: Path, count: int, source: Path) -> None:
    """A tenth as many that are broken: empty, no video, a head without an end, an end without a head."""
    data = source.read_bytes()
    kinds = (b"", b"this is no video\n" * 1000, data[: len(data) // 50], data[len(data) // 2 :])
    for i in range(count):
        mark = b"" if i % 4 == 0 else i.to_bytes(8, "big")
        (folder / f"bad{i:03d}.mp4").write_bytes(kinds[i % 4] + mark if kinds[i % 4] else b"")


def poisoned_videos(folder: Path, cache: Path) -> None:
    for frames, how in POISON.items():
        made = footage.folder_of(f"frames-{frames}", seconds=frames / footage.FPS, cache=cache)
        assert footage.num_frames(made / "video.mp4") == frames
        shutil.copy(made / "video.mp4", folder / f"{how}.mp4")


def job(folder: Path, root: Path) -> JobSummary:
    shutil.rmtree(root, ignore_errors=True)
    options = JobOptions(engine="local", workers=2, max_quarantined=1.0)
    return Job(recipe(), [str(folder)], root=str(root), name="bench", options=options, progress=Silent()).run()


def measure(count: int, cache: Path, *, turns: int) -> dict[str, Any]:
    """Medians of both jobs; the second is checked to have named every bad file and done every good one."""
    piece = footage.piece(cache)
    alone, among = cache / "poison-good", cache / "poison-all"
    for folder in (alone, among):
        shutil.rmtree(folder, ignore_errors=True)
        good_videos(folder, count, piece)
    bad = max(4, count // 10)
    bad_files(among, bad, piece)
    poisoned_videos(among, cache)
    empty = -(-bad // 4) - 1  # empty files are one content
    seconds: dict[str, list[float]] = {"good": [], "all": []}
    classes: Counter[str] = Counter()
    for turn in range(turns):
        for name in ("good", "all") if turn % 2 == 0 else ("all", "good"):
            root = cache / f"root-poison-{name}"
            s = job(alone if name == "good" else among, root)
            seconds[name].append(s.seconds)
            if name == "good":
                assert (s.done, s.quarantined, s.pending) == (count, 0, 0), s
                continue
            assert (s.done, s.quarantined, s.pending) == (count, bad - empty + len(POISON), 0), s
            rows = {Path(r["uri"]).stem: r["class"] for r in videoflow.open(str(root)).quarantine()}
            assert {how: rows[how] for how in EXPECTED} == EXPECTED, rows
            assert sum(n.startswith("bad") for n in rows) == bad, rows
            classes = Counter(rows.values())
    good, whole = (sorted(seconds[n])[len(seconds[n]) // 2] for n in ("good", "all"))
    return {
        "good_videos": count,
        "bad_files": bad + len(POISON),
        "good_seconds": good,
        "poisoned_seconds": whole,
        "poison_ratio": (whole - DEADLINE_SECONDS) / good,
        "bound_seconds": FACTOR * good + DEADLINE_SECONDS,
        "classes": dict(sorted(classes.items())),
    }


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.poison", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--quick", action="store_true", help="fewer videos, one turn; the deadline alone takes two minutes")
    p.add_argument("--cache", type=Path, default=footage.CACHE, help="folder for the videos; made once")
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object, last")
    o = p.parse_args()
    figures = measure(10 if o.quick else 40, o.cache, turns=1 if o.quick else 3)
    table = Table("figure", "value", title="poison")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    table.add_row("holds", "yes" if figures["poisoned_seconds"] <= figures["bound_seconds"] else "NO")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100).print(table)
    if o.json:
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()
