"""What a large catalog costs: second runs, plans of a million items, commits to tables of many fragments, the driver's
share, and what goes through Ray's object store.

    python -m benchmarks.scale [--quick] [--json] [--only STEP]

Every step runs in a process of its own; its peak memory is the kernel's count. Inputs are made by
benchmarks/synthetic.py and kept in --cache. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import footage, synthetic
from benchmarks.measure import run as run_command

#: Figure: (bound, "≥" or "≤"), as promised; figures without a bound explain those that have one.
BOUNDS = {
    "second_run_decodes": 0.0,
    "second_run_sources_opened": 0.0,
    "plan_seconds": 20.0,
    "plan_rss_mb": 1000.0,
    "append_seconds": 1.0,
    "driver_ms_per_item": 2.0,
}
SECOND_RUN_SHARE, SECOND_RUN_SECONDS = 0.02, 10.0
#: Flat: what allocators keep and give back, beside a few hundred MB of libraries.
FLAT_MB, FLAT_BYTES = 50.0, 64 * 1024


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    videos: int
    plan_videos: int
    plan_clips: int
    fragments: int
    driver_items: int
    seconds: tuple[int, int]


FULL = Size(2000, 100_000, 7, 49_900, 100_000, (5, 120))
QUICK = Size(60, 10_000, 7, 49_900, 10_000, (2, 20))


@dataclass(frozen=True)
class Run:
    """One step: what it printed last, wall and CPU seconds and peak resident MB of its process."""

    answer: Any
    seconds: float
    cpu_seconds: float
    peak_mb: float


def step(module: str, *arguments: str) -> Run:
    """A Python module in a fresh process.

    Raises:
        RuntimeError: it failed.
    """
    done = run_command([sys.executable, "-m", module, *arguments], core=None, cwd=footage.REPOSITORY)
    answer = json.loads(done.output.splitlines()[-1])
    return Run(answer, done.wall_seconds, done.cpu_seconds, done.peak_mb)


class Bench:
    """The inputs and the steps."""

    def __init__(self, size: Size, cache: Path) -> None:
        self.size = size
        self.cache = cache

    def fresh(self, name: str) -> Path:
        """A root that nobody has used."""
        root = self.cache / name
        shutil.rmtree(root, ignore_errors=True)
        return root

    def second_run(self) -> dict[str, float]:
        """The same recipe twice over the same videos."""
        count = self.size.videos
        folder, root = synthetic.tiny_videos(self.cache / f"tiny-{count}", count), str(self.fresh("root-second"))
        first = step("benchmarks.scale_side", "run", str(folder), root).answer
        second = step("benchmarks.scale_side", "run", str(folder), root).answer
        if (first["decodes"], first["opened"], first["clips"]) != (count, count, second["clips"]):
            raise RuntimeError(f"the first run should have opened and decoded {count} videos: {first}")
        return {
            "second_run_videos": count,
            "second_run_decodes": second["decodes"],
            "second_run_sources_opened": second["opened"],
            "first_run_seconds": first["seconds"],
            "second_run_seconds": second["seconds"],
            "second_run_share": second["seconds"] / first["seconds"],
        }

    def plan(self) -> dict[str, float]:
        """`videoflow plan` over files on disk whose every product is cached."""
        videos, clips = self.size.plan_videos, self.size.plan_clips
        folder, root = (
            synthetic.hollow_videos(self.cache / f"hollow-{videos}", videos),
            self.cache / f"root-plan-{videos}",
        )
        recipe = self.cache / "synthetic.yaml"
        recipe.write_text(json.dumps(synthetic.recipe().model_dump(mode="json")))
        if not (root / "complete").is_file():
            synthetic.cached_catalog(self.fresh(root.name), folder, clips_a_video=clips)
            (root / "complete").touch()
        where = ["--root", str(root), "--source", str(folder), "--name", "bench"]
        done = step("videoflow.cli.main", "plan", str(recipe), *where, "--json")
        stages = done.answer["stages"]
        if done.answer["to_decode"] or any(s["to_compute"] or s["unknown"] for s in stages):
            raise RuntimeError(f"all should have been cached: {done.answer}")
        return {
            "plan_items": sum(s["cached"] for s in stages),
            "plan_seconds": done.seconds,
            "plan_cpu_seconds": done.cpu_seconds,
            "plan_rss_mb": done.peak_mb,
        }

    def append(self) -> dict[str, float]:
        """One more unit of a table of many fragments: by a committer that has just come, and by one at work."""
        answer = step(
            "benchmarks.scale_side", "append", str(self.size.fragments), str(self.fresh("root-append"))
        ).answer
        first, *later = answer["seconds"]
        return {
            "append_fragments": answer["fragments"],
            "append_first_seconds": first,
            "append_seconds": median(later),
        }

    def driver(self) -> dict[str, float]:
        """A job of many items and one of a tenth of them, whose engine does nothing."""
        found: list[tuple[dict[str, Any], float]] = []
        for items in (self.size.driver_items // 10, self.size.driver_items):
            videos = items // (2 + synthetic.CLIPS_A_VIDEO)  # a pass, a set of clips, and each clip
            folder = synthetic.hollow_videos(self.cache / f"hollow-{videos}", videos)
            done = step("benchmarks.scale_side", "pretend", str(folder), str(self.fresh("root-driver")))
            found.append((done.answer, done.peak_mb))
        (_, few_mb), (many, many_mb) = found
        return {
            "driver_items": many["items"],
            "driver_ms_per_item": many["driver_seconds"] / many["items"] * 1000,
            "driver_rss_growth_mb": max(many["growth_mb"].values()),
            "driver_peak_mb_tenth": few_mb,
            "driver_peak_mb": many_mb,
        }

    def object_store(self) -> dict[str, float]:
        """The same recipe on Ray over a short video and a long one, of the same pictures."""
        folders = [footage.folder_of(f"store-{s}", seconds=s, cache=self.cache) for s in self.size.seconds]
        answers = step("benchmarks.scale_side", "ray", *map(str, folders), str(self.fresh("root-ray"))).answer
        found = {}
        for name, answer in zip(("short", "long"), answers, strict=True):
            found[f"object_store_frames_{name}"] = answer["frames"]
            found[f"object_store_cached_bytes_{name}"] = answer["cached_bytes"]
            found[f"object_store_peak_bytes_{name}"] = answer["peak_bytes"]
            found[f"object_store_created_bytes_{name}"] = answer["created_bytes"]
        return found


def holds(name: str, f: dict[str, float]) -> bool | None:
    """Whether a figure keeps its promise; None where it has none."""
    if name in BOUNDS:
        return f[name] <= BOUNDS[name]
    if name == "second_run_seconds":
        return f[name] <= max(SECOND_RUN_SECONDS, SECOND_RUN_SHARE * f["first_run_seconds"])
    if name == "driver_rss_growth_mb":
        return f[name] <= FLAT_MB
    if name == "object_store_created_bytes_long":
        return f[name] <= f["object_store_created_bytes_short"] + FLAT_BYTES
    return None


def show(figures: dict[str, float]) -> None:
    """A table for people."""
    table = Table("figure", "value", "holds", title="scale")
    for name, value in figures.items():
        verdict = holds(name, figures)
        table.add_row(name, f"{value:,.3f}".rstrip("0").rstrip("."), {None: "–", True: "yes", False: "NO"}[verdict])
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100).print(table)


def measure(bench: Bench, only: Sequence[str]) -> dict[str, float]:
    """All figures, or those of some steps."""
    steps: dict[str, Callable[[], dict[str, float]]] = {
        "second": bench.second_run,
        "plan": bench.plan,
        "append": bench.append,
        "driver": bench.driver,
        "store": bench.object_store,
    }
    figures: dict[str, float] = {}
    for name, run in steps.items():
        if not only or name in only:
            print(f"{name} …", file=sys.stderr, flush=True)
            figures |= run()
    return figures


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--quick", action="store_true", help="fewer of everything; within 3 minutes")
    p.add_argument("--only", action="append", default=[], choices=["second", "plan", "append", "driver", "store"])
    p.add_argument("--cache", type=Path, default=footage.CACHE, help="folder for the inputs; made once")
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object, last")
    o = p.parse_args()
    o.cache.mkdir(parents=True, exist_ok=True)
    figures = measure(Bench(QUICK if o.quick else FULL, o.cache), o.only)
    show(figures)
    if o.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
