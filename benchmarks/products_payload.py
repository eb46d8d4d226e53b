"""What a payload takes and costs: bytes a second of clip, and CPU seconds per 1,000 frames through the loader.

    python -m benchmarks.products_payload [--seconds 40] [--short-side 720] [--rounds 5] [--json]

The same clips (720p, 24 frames/s, real pictures, see footage.py) are stored twice, as closed-GOP H.264 and as JPEG, and
read through the loader in turns on two decoding threads, at their own size. CPU seconds are those of the whole process,
reading, CRC, decoding, colour and hand-over included; the first round of each warms up and is not counted. JSON, last
line: ``payload_bytes_per_second, payload_decode_cost, jpeg_decode_cost`` and how they came about.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import videoflow
from benchmarks.footage import folder_of
from videoflow.dataset.version import Version
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.loader import Loader
from videoflow.recipe import Recipe
from videoflow.unit import UnitReport

FRAMES, BATCH = 48, 4


class _Quiet:
    """A job that tells nothing."""

    def begin(self, stage: str, total: int, unit: str) -> None: ...

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None: ...


def made(folder: Path, root: Path, codec: str, short_side: int) -> tuple[Version, dict[str, Any]]:
    """The clips with a payload of a codec, as a version; what its stage took."""
    recipe = Recipe(
        stages={
            "frames": {},
            "clips": {"by": "windows", "window_seconds": 4, "min_seconds": 4},
            "payload": {"codec": codec, "short_side": short_side},
        }
    )
    options = JobOptions(engine="local", workers=1)
    job = Job(recipe, [str(folder)], root=str(root), name=codec, options=options, progress=_Quiet())
    summary = job.run()
    return videoflow.open(str(root)).version(summary.version or codec), summary.stages["payload"]


def stored(version: Version) -> tuple[int, float]:
    """(bytes of all payloads, seconds of all clips)."""
    rows = version.clips(columns=["payload", "t0_us", "t1_us"]).to_pylist()
    return sum(r["payload"]["length"] for r in rows), sum(r["t1_us"] - r["t0_us"] for r in rows) / 1e6


def read(version: Version) -> tuple[float, int]:
    """(CPU seconds, frames) of one epoch; the loader's start is left out."""
    with Loader(version, batch_size=BATCH, frames=FRAMES, source="payload", epochs=1, tail="pad", seed=1) as loader:
        began, frames = time.process_time(), 0
        for batch in loader:
            frames += int(batch["frame_valid"][batch["valid"]].sum())
        return time.process_time() - began, frames


def measure(seconds: float, short_side: int, rounds: int) -> dict[str, Any]:
    """Both codecs, in turns."""
    folder = folder_of(f"payload-{seconds:g}", seconds=seconds)
    costs: dict[str, list[float]] = {"h264": [], "jpeg": []}
    with tempfile.TemporaryDirectory(prefix="videoflow-bench-") as root:
        versions = {codec: made(folder, Path(root, codec), codec, short_side) for codec in costs}
        sizes = {codec: stored(version) for codec, (version, _) in versions.items()}
        for n in range(rounds + 1):
            for codec, (version, _) in versions.items():
                cpu, frames = read(version)
                if n:
                    costs[codec].append(1000 * cpu / frames)
    num_bytes, length = sizes["h264"]
    return {
        "payload_bytes_per_second": round(num_bytes / length),
        "payload_decode_cost": round(statistics.median(costs["h264"]), 3),
        "jpeg_decode_cost": round(statistics.median(costs["jpeg"]), 3),
        "jpeg_bytes_per_second": round(sizes["jpeg"][0] / length),
        "payload_range": [round(f(costs["h264"]), 3) for f in (min, max)],
        "jpeg_range": [round(f(costs["jpeg"]), 3) for f in (min, max)],
        "clip_seconds": length,
        "short_side": short_side,
        "rounds": rounds,
        "stage_worker_seconds": {c: round(took["worker_seconds"], 2) for c, (_, took) in versions.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--short-side", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only the object")
    given = parser.parse_args()
    found = measure(given.seconds, given.short_side, given.rounds)
    if not given.json:
        print(f"H.264: {found['payload_bytes_per_second'] / 1e6:.2f} MB a second of clip,", end=" ")
        print(f"{found['payload_decode_cost']} CPU seconds per 1,000 frames {found['payload_range']}")
        print(f"JPEG:  {found['jpeg_bytes_per_second'] / 1e6:.2f} MB a second of clip,", end=" ")
        print(f"{found['jpeg_decode_cost']} CPU seconds per 1,000 frames {found['jpeg_range']}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
