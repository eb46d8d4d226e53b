"""How much faster tokens load than the frames of the same clips, and how good the default tokenizer is.

    python -m benchmarks.products_tokens [--seconds 40] [--rounds 5] [--json]

A video of real pictures (720p, see footage.py) runs through recipe `latents` at its own defaults. Then the loader reads
whole clips in turns: their cached frames as they are stored, and their tokens, both from the same version, in the same
order, with the same batch size and threads; the loader's start is left out, and the first round of each warms up and is
not counted. JSON, last line: ``tokens_vs_frames`` (clips a second of tokens over those of frames, median of the pairs),
``tokens_vs_frames_cpu`` (the same by CPU seconds, which say more where others use the machine), ``patch_vq_psnr`` (mean
over the clips, dB) and how they came about.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import videoflow
from benchmarks.footage import folder_of
from benchmarks.measure import ratio_of
from videoflow import recipe as recipes
from videoflow.dataset.version import Version
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.unit import UnitReport

BATCH, EPOCHS = 4, 4


class _Quiet:
    """A job that tells nothing."""

    def begin(self, stage: str, total: int, unit: str) -> None: ...

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None: ...


def made(folder: Path, root: str) -> tuple[Version, dict[str, Any]]:
    """The version, and what its stages took."""
    options = JobOptions(engine="local", workers=1)
    recipe = recipes.load("pipelines.latents:recipe")
    job = Job(recipe, [str(folder)], root=root, name="latents", options=options, progress=_Quiet())
    summary = job.run()
    return videoflow.open(root).version("latents"), summary.stages


def clips_per_second(version: Version, **options: Any) -> tuple[float, float]:
    """(by the clock, by CPU seconds) over some epochs."""
    with version.loader(batch_size=BATCH, epochs=EPOCHS, tail="pad", seed=1, **options) as loader:
        began, began_cpu, count = time.perf_counter(), time.process_time(), 0
        for batch in loader:
            count += int(batch["valid"].sum())
        return count / (time.perf_counter() - began), count / (time.process_time() - began_cpu)


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Both sides, in turns."""
    folder = folder_of(f"tokens-{seconds:g}", seconds=seconds)
    with tempfile.TemporaryDirectory(prefix="videoflow-bench-") as root:
        version, stages = made(folder, root)
        rows = version.clips(columns=["tokens", "tokenize_psnr", "tokenize_ssim", "grid_count"]).to_pylist()
        frames = {"frames": "1+1k"}
        tokens = {"video": False, "columns": ["tokens"]}
        sides: dict[str, list[float]] = {"frames": [], "tokens": []}
        cpu: dict[str, list[float]] = {"frames": [], "tokens": []}
        for n in range(rounds + 1):
            for name, options in (("frames", frames), ("tokens", tokens)):
                wall, busy = clips_per_second(version, **options)
                if n:
                    sides[name].append(wall)
                    cpu[name].append(busy)
        ratio, ratio_cpu = (ratio_of(found["tokens"], found["frames"]) for found in (sides, cpu))
    return {
        "tokens_vs_frames": round(ratio.median, 1),
        "patch_vq_psnr": round(sum(r["tokenize_psnr"] for r in rows) / len(rows), 2),
        "tokens_vs_frames_interval": [round(ratio.low, 1), round(ratio.high, 1)],
        "tokens_vs_frames_cpu": round(ratio_cpu.median, 1),
        "patch_vq_psnr_range": [round(f(r["tokenize_psnr"] for r in rows), 2) for f in (min, max)],
        "patch_vq_ssim": round(sum(r["tokenize_ssim"] for r in rows) / len(rows), 3),
        "clips_per_second": {name: round(max(found), 1) for name, found in sides.items()},
        "clips": len(rows),
        "mean_frames": round(sum(r["grid_count"] for r in rows) / len(rows), 1),
        "shape": rows[0]["tokens"]["shape"],
        "rounds": rounds,
        "tokenize_worker_seconds": round(stages["tokenize"]["worker_seconds"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only the object")
    given = parser.parse_args()
    found = measure(given.seconds, given.rounds)
    if not given.json:
        print(f"tokens load {found['tokens_vs_frames']} × as fast as frames {found['tokens_vs_frames_interval']},")
        print(f"patch-vq: {found['patch_vq_psnr']} dB, SSIM {found['patch_vq_ssim']}, over {found['clips']} clips")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
