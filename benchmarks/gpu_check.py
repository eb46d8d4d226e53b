"""One short call on a machine with a GPU: are the GPU paths right, and what do they bring?

    python -m benchmarks.gpu_check [--source FOLDER] [--json]

Compares the loader's DALI engine on the GPU with the CPU engine (pixels at cached size to the bit where the GPU's JPEG
decoder agrees, else by mean and maximum), the shot detector and the embedder on the GPU with their CPU results, and
measures clips per second of both engines, alternating; and the decode pass on NVDEC (benchmarks/nvdec_check.py, which
also runs alone and needs no torch). Needs about two minutes.
Exit code 3 where there is no GPU: what could not be done is listed, nothing is measured and nothing is claimed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import nvdec_check
from videoflow import Catalog, Recipe
from videoflow.cli.progress import LineProgress
from videoflow.errors import MissingExtra
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.testing import make_barcode_video

#: After a GPU's own JPEG decoder; DESIGN's bound after a resize.
MEAN_BOUND, MAX_BOUND = 0.5, 12
RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 2}})
PAIRS = 5
STEPS = ("pixels of the loader's engines, GPU against CPU", "clips/s of both engines", "embeddings, GPU against CPU")


def main() -> int:
    p = argparse.ArgumentParser(description="Are the GPU paths right, and what do they bring?")
    p.add_argument("--source", type=Path, help="folder of videos (default: made here)")
    p.add_argument("--json", action="store_true", help="print one JSON object last")
    options = p.parse_args()
    try:
        import torch
    except ImportError as e:
        raise MissingExtra("torch", needed_for="gpu_check", extra="torch") from e
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was measured. Not done:", file=sys.stderr)
        for step in (*STEPS, *(f"nvdec: {step}" for step in nvdec_check.STEPS)):
            print(f"  {step}", file=sys.stderr)
        return 3
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "nvdec": nvdec_check.measure(options.source)}
    with tempfile.TemporaryDirectory() as folder:
        version = make_version(options.source, Path(folder))
        result["parity"] = {str(size): parity(version, size) for size in (None, 112, 160)}
        result["clips_per_second"] = rates(version)
        result["models"] = models()
    parity_holds = all(p["mean"] <= MEAN_BOUND and p["max"] <= MAX_BOUND for p in result["parity"].values())
    result["holds"] = parity_holds and bool(result["nvdec"].get("holds"))
    for key, value in result.items():
        print(f"{key}: {value}")
    if options.json:
        print(json.dumps(result))
    return 0 if result["holds"] else 1


def make_version(source: Path | None, folder: Path) -> Any:
    """A version of one picture size, so that size=None fits in a batch."""
    if source is None:
        source = folder / "videos"
        source.mkdir()
        for i in range(8):
            make_barcode_video(source / f"{i}.mp4", num_frames=240, offset=i * 500)
    options = JobOptions(engine="local", max_quarantined=1.0)
    job = Job(RECIPE, [str(source)], root=str(folder / "catalog"), name="gpu", options=options, progress=LineProgress())
    published = job.run().version
    assert published is not None
    return Catalog.open(folder / "catalog").version(published)


def parity(version: Any, size: int | None) -> dict[str, float]:
    """Mean and maximum difference of the two engines over one epoch, in steps of 255."""
    common = {"batch_size": 4, "frames": 8, "fps": 8, "size": size, "epochs": 1, "tail": "pad"}
    means, most = [], 0
    with version.loader(engine="cpu", **common) as a, version.loader(engine="dali", device="cuda", **common) as b:
        for left, right in zip(a, b, strict=True):
            assert left["clip_key"] == right["clip_key"]
            d = (left["video"].int() - right["video"].cpu().int()).abs()
            means.append(float(d.float().mean()))
            most = max(most, int(d.max()))
    return {"mean": statistics.fmean(means), "max": most}


def rates(version: Any) -> dict[str, float]:
    """Median clips per second of both engines, delivered to the GPU, in alternating runs."""
    import torch

    found: dict[str, list[float]] = {"cpu": [], "dali": []}
    for _ in range(PAIRS):
        for engine, all_rates in found.items():
            with version.loader(
                engine=engine, device="cuda", batch_size=8, frames=8, fps=8, size=128, epochs=4
            ) as loader:
                iterator, count = iter(loader), 0
                next(iterator)
                began = time.perf_counter()
                for batch in iterator:
                    count += len(batch["clip_key"])
                torch.cuda.synchronize()
                all_rates.append(count / (time.perf_counter() - began))
    return {k: statistics.median(v) for k, v in found.items()}


def models() -> dict[str, Any]:
    """Embedder on the GPU against the CPU, same dtype: cosine of one clip's vector."""
    import torch

    from videoflow.stage import ClipFrames
    from workers.embed import Embed, EmbedParams

    clip = ClipFrames("k", "v", np.random.default_rng(0).integers(0, 255, (8, 256, 456, 3), np.uint8), np.arange(8.0))
    on_gpu = Embed(EmbedParams(dtype="float32"))
    on_gpu.setup()
    gpu = np.array(on_gpu.process([clip])[0].rows[0]["vector"])
    real = torch.cuda.is_available
    torch.cuda.is_available = lambda: False  # the same stage, kept off the GPU
    try:
        on_cpu = Embed(EmbedParams(dtype="float32"))
        on_cpu.setup()
        cpu = np.array(on_cpu.process([clip])[0].rows[0]["vector"])
    finally:
        torch.cuda.is_available = real
    return {"embed_cosine": float(gpu @ cpu)}


if __name__ == "__main__":
    sys.exit(main())
