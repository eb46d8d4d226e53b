"""One measured step of benchmarks.scale, in a process of its own; prints one JSON object, last.

python -m benchmarks.scale_side run FOLDER ROOT          a job over real videos, on the local engine
python -m benchmarks.scale_side pretend FOLDER ROOT      a job whose engine pretends: what is left is the driver
python -m benchmarks.scale_side append FRAGMENTS ROOT    commits of units to a table of many fragments
python -m benchmarks.scale_side ray FOLDER… ROOT         jobs on one Ray: bytes that went through its object store
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from benchmarks.opens import Opens
from videoflow import recipe as recipes
from videoflow.dataset.catalog import Catalog
from videoflow.execute import JobOptions, JobSummary
from videoflow.job import Job
from videoflow.recipe import Recipe
from videoflow.store.commit import Committer
from videoflow.unit import UnitReport

COMMITS = 5


class Silent:
    """Progress of a job that nobody watches."""

    def begin(self, stage: str, total: int, unit: str) -> None: ...

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None: ...


def real_recipe() -> Recipe:
    """Frames, cuts, quality and clips of short videos, without a model."""
    clips = recipes.load("clips").with_settings(["shots.detector=hsv", "clips.min_seconds=0.1"])
    return clips.model_copy(update={"stages": {k: v for k, v in clips.stages.items() if k != "embed"}})


def job(recipe: Recipe, folder: Path, root: Path, *, engine: str, workers: int = 2) -> JobSummary:
    options = JobOptions(engine=engine, workers=workers)
    return Job(recipe, [str(folder)], root=str(root), name="bench", options=options, progress=Silent()).run()


def run(folder: Path, root: Path) -> dict[str, Any]:
    """A job over a folder of videos; what it decoded, and which files it opened."""
    with Opens(folder) as opens:
        summary = job(real_recipe(), folder, root, engine="local")
    seconds, clips = summary.seconds, summary.clips
    return {"seconds": seconds, "decodes": summary.decoded_videos, "opened": len(set(opens.names)), "clips": clips}


def pretend(folder: Path, root: Path) -> dict[str, Any]:
    """CPU of a whole job less that of its engine, by item; resident sizes on the way."""
    synthetic.Pretender.samples.append(("start", 0, _resident_mb()))
    began = time.process_time()
    summary = job(synthetic.recipe(), folder, root, engine="benchmarks.synthetic:Pretender")
    driver = time.process_time() - began - synthetic.Pretender.inside_seconds
    assert summary.done == summary.videos > 0 and summary.clips == summary.videos * synthetic.CLIPS_A_VIDEO
    items = sum(stage["items"] for stage in summary.stages.values())
    growth = {}
    for stage in summary.stages:
        name = {"decode": "probe"}.get(stage, stage)
        seen = [(done, mb) for at, done, mb in synthetic.Pretender.samples if at == name]
        early = next(mb for done, mb in seen if done >= seen[-1][0] / 10)
        growth[stage] = seen[-1][1] - early
    return {"items": items, "driver_seconds": driver, "peak_mb": _peak_mb(), "growth_mb": growth}


def append(fragments: int, root: Path) -> dict[str, Any]:
    """Seconds of each of a few commits of one unit each to a table of that many fragments."""
    catalog = Catalog.open(root, create=True)
    target = synthetic.fragmented_table(catalog, fragments)
    committer = Committer(catalog.root, catalog.ledger)
    seconds = []
    for i in range(COMMITS):
        record = synthetic.one_row_unit(catalog, target, f"{i + 1:032x}")
        began = time.monotonic()
        committer.commit([record])
        seconds.append(time.monotonic() - began)
    return {"fragments": fragments, "seconds": seconds, "cpu_seconds": time.process_time()}


def ray(folders: list[Path], root: Path) -> list[dict[str, Any]]:
    """Jobs on Ray, one a folder of one video: bytes that each has put into the object store, and most that lay there at
    once. The first folder is done twice, so that what a first job leaves behind is counted to none.
    """
    from benchmarks.ray_store import WatchedRayEngine, one_ray

    answers = []
    with one_ray(workers=1):
        for i, folder in enumerate([folders[0], *folders]):
            where = root / str(i)
            summary = job(real_recipe(), folder, where, engine="benchmarks.ray_store:WatchedRayEngine", workers=1)
            assert summary.done == 1 and summary.decoded_videos == 1
            stored = {"peak_bytes": WatchedRayEngine.peak_bytes, "created_bytes": WatchedRayEngine.created_bytes}
            cached = _size(where / "frames")
            answers.append({**stored, "frames": summary.frames_decoded, "clips": summary.clips, "cached_bytes": cached})
    return answers[1:]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _resident_mb() -> float:
    return float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    step, *what, last = sys.argv[1:]
    root = Path(last)
    steps: dict[str, Callable[[], Any]] = {
        "run": lambda: run(Path(what[0]), root),
        "pretend": lambda: pretend(Path(what[0]), root),
        "append": lambda: append(int(what[0]), root),
        "ray": lambda: ray([Path(folder) for folder in what], root),
    }
    print(json.dumps(steps[step]()))


if __name__ == "__main__":
    main()
