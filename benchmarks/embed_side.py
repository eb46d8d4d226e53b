"""Embedding backfill against the model alone: new vectors for clips that are cached already. Prints one JSON object as
its last line.

    python -m benchmarks.embed_side FOLDER OUT [--fps F]

In turns: CPU seconds of the bare forward pass over as many frames, at full batches and with pictures that lie ready in
memory, and of the backfill; one thread. Their ratio is how busy the backfill keeps the model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from videoflow import recipe as recipes
from videoflow.dataset.catalog import Catalog
from videoflow.execute import JobOptions
from videoflow.identify import identify
from videoflow.job import Job
from videoflow.plan import FRAMES, Plan
from videoflow.sources import scan
from videoflow.store.writer import ensure_target
from videoflow.unit import StageWork, Unit, UnitReport
from workers.embed import FRAMES_AT_ONCE, Embed
from workers.run_unit import UnitRunner

#: Units of whole batches; the first one only warms up.
MAX_TURNS = 4


class Silent:
    """Progress of a job that nobody watches."""

    def begin(self, stage: str, total: int, unit: str) -> None: ...

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None: ...


def backfill_units(folder: Path, out: Path, fps: str) -> list[Unit]:
    """Fill the cache without the model, then cut its clips into units for the embed stage: a batch to warm up, and as
    many more as there are whole batches for.
    """
    settings = ["shots.detector=hsv", "clips.max_seconds=1"]
    clips = recipes.load("clips").with_settings(settings)
    without = clips.model_copy(update={"stages": {k: v for k, v in clips.stages.items() if k != "embed"}})
    options = JobOptions(engine="local", workers=1)
    Job(without, [str(folder)], root=str(out), name="cached", options=options, progress=Silent()).run()
    recipe = clips.with_settings([f"embed.fps={fps}", "embed.dtype=float32"])
    catalog = Catalog.open(str(out))
    found = identify(catalog, scan([str(folder)]), job="benchmark", on_file=lambda: None)
    plan = Plan(catalog.root, catalog.ledger, recipe, recipe.build(), found.videos)
    built, frames = plan.named("embed"), plan.named(FRAMES)
    assert built is not None and frames is not None
    clips = plan.clips()
    items = list(plan.missing_clips(built, clips, plan.clip_items(built, clips)))
    schema = built.stage.schema()
    target = ensure_target(plan.root, stage=built.name, fingerprint=built.fingerprint, table=built.table, schema=schema)
    work = (StageWork(built.stage, built.fingerprint, target),)
    batch = Embed.batch_size
    per_turn = max(batch, (len(items) - batch) // MAX_TURNS // batch * batch)
    edges = [0, *range(batch, len(items) + 1, per_turn)]
    tables = {FRAMES: plan.parts(frames)}
    return [Unit(work, tuple(items[a:b]), plan.root, "benchmark", tables=tables) for a, b in pairwise(edges)]


def cpu_seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--fps", default="8")
    o = p.parse_args()
    shutil.rmtree(o.out, ignore_errors=True)
    units = backfill_units(o.folder, o.out, o.fps)
    runner = UnitRunner()
    runner.run(units[0])
    model = Embed(units[0].works[0].stage.params)
    model.setup()
    torch.set_num_threads(1)
    batch = [np.full((model.params.size, model.params.size, 3), i, np.uint8) for i in range(FRAMES_AT_ONCE)]
    model.features(batch)
    bare_seconds, backfill_seconds, frames = [], [], []
    for unit in units[1:]:
        count = sum(len(item.wanted) for item in unit.items)
        before = cpu_seconds(lambda: model.features(batch))
        backfill_seconds.append(cpu_seconds(lambda u=unit: runner.run(u)))
        after = cpu_seconds(lambda: model.features(batch))
        bare_seconds.append((before + after) / 2 / FRAMES_AT_ONCE * count)
        frames.append(count)
    runner.close()
    print(json.dumps({"bare_seconds": bare_seconds, "backfill_seconds": backfill_seconds, "frames": sum(frames)}))


if __name__ == "__main__":
    main()
