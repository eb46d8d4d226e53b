"""Is NVDEC what `decoder: nvdec` takes it for, and what does it bring?

    python -m benchmarks.nvdec_check [--source FILE_OR_FOLDER] [--json]

Compares the planes of GPU and CPU to the bit, on the clips that a worker checks its GPU with, on the small ones of the
decoder's identity, and on every file of the source (default: the hard files, and 720p footage made here); then times
both on the largest file that is equal: decoding alone, and a whole pass (probe, frame cache, cuts, quality), in
alternating runs. Needs no torch and about a minute.
Exit code 3 where there is no GPU: what could not be done is listed, nothing is measured and nothing is claimed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.footage import corpus, piece
from videoflow.errors import MediaError, SystemFailure, VideoflowError
from videoflow.media.decoder import open_decoder
from videoflow.media.nvdec import LeftToCpu, gpu, open_on_gpu, suits_gpu
from workers.canary import canary_paths
from workers.decode import Opener, run_pass
from workers.frames import Frames
from workers.nvdec import CLIPS, TOLERANCE, check_gpu, largest_difference
from workers.probe import Probe
from workers.quality import Quality
from workers.shots import Shots, ShotsParams

PAIRS = 3
#: Decoding alone is timed over so many frames at most.
MAX_FRAMES = 1500
STEPS = (
    "planes equal on the clips of workers/canaries",
    "planes equal on real videos",
    "frames/s of decoding, GPU against CPU",
    "frames/s of a whole pass, GPU against CPU",
)


def main() -> int:
    p = argparse.ArgumentParser(description="Is NVDEC what `decoder: nvdec` takes it for, and what does it bring?")
    p.add_argument("--source", type=Path, help="video or folder of videos (default: the hard files and footage)")
    p.add_argument("--json", action="store_true", help="print one JSON object last")
    options = p.parse_args()
    result = measure(options.source)
    for key, value in result.items():
        print(f"{key}: {value}")
    if options.json:
        print(json.dumps(result))
    return 3 if "not_done" in result else 0 if result["holds"] else 1


def measure(source: Path | None) -> dict[str, Any]:
    """All figures; where there is no GPU, ``why`` and what was ``not_done``."""
    try:
        gpu()
    except SystemFailure as e:
        return {"why": str(e), "not_done": list(STEPS)}
    began = time.perf_counter()
    result: dict[str, Any] = {"clips": compared([*canary_paths(), *sorted(CLIPS.iterdir())])[0]}
    try:
        check_gpu()
        result["believed"] = True
    except SystemFailure as e:
        result["believed"] = str(e)
    result["check_seconds"] = time.perf_counter() - began
    result["videos"], equal = compared(videos_of(source))
    largest = max(equal, key=lambda f: f.stat().st_size, default=None)
    result["speed"] = "no file of the source comes out of the GPU as from the CPU" if not largest else speed(largest)
    result["holds"] = result["believed"] is True and not result["clips"]["differ"] and not result["videos"]["differ"]
    return result


def videos_of(source: Path | None) -> list[Path]:
    """The source's files; by default all hard files there are, and footage where it can be made."""
    if source is not None:
        return sorted(f for f in source.rglob("*") if f.is_file()) if source.is_dir() else [source]
    files = sorted(f for f in corpus().rglob("*") if f.is_file() and f.suffix != ".tsv") if corpus().is_dir() else []
    try:
        return [*files, piece()]
    except (VideoflowError, OSError) as e:
        print(f"no footage could be made ({e}): speeds are those of the largest hard file", file=sys.stderr)
        return files


def compared(files: list[Path]) -> tuple[dict[str, Any], list[Path]]:
    """How many files come out ``equal`` on both, which ``differ`` and by how much, and why others stay on the CPU; and
    the equal ones.
    """
    equal, differ, left = list[Path](), dict[str, int](), Counter[str]()
    for path in files:
        try:
            most = largest_difference(path)
        except LeftToCpu as e:
            left[str(e)] += 1
        except MediaError as e:
            left[f"unusable: {e.code}"] += 1
        else:
            if most > TOLERANCE:
                differ[path.name] = most
            else:
                equal.append(path)
    return {"equal": len(equal), "differ": differ, "left_to_cpu": dict(left)}, equal


def speed(path: Path) -> dict[str, Any]:
    """Median frames/s (wall) and CPU milliseconds a frame of both decoders."""
    openers: dict[str, Opener] = {"cpu": open_decoder, "nvdec": partial(open_on_gpu, pix_fmt=suits_gpu(path))}
    found: dict[str, Any] = {"file": path.name}
    works: dict[str, Callable[[Path, Opener], int]] = {"decode": decode_only, "pass": whole_pass}
    for what, work in works.items():
        rates: dict[str, list[float]] = {name: [] for name in openers}
        cpu_ms: dict[str, list[float]] = {name: [] for name in openers}
        for _ in range(PAIRS):
            for name, opener in openers.items():
                began, cpu = time.perf_counter(), time.process_time()
                frames = work(path, opener)
                rates[name].append(frames / (time.perf_counter() - began))
                cpu_ms[name].append(1000 * (time.process_time() - cpu) / frames)
        medians = {name: statistics.median(r) for name, r in rates.items()}
        found[what] = {
            "frames_per_second": medians,
            "cpu_ms_per_frame": {name: statistics.median(m) for name, m in cpu_ms.items()},
            "ratio": medians["nvdec"] / medians["cpu"],
        }
    return found


def decode_only(path: Path, opener: Opener) -> int:
    """Frames decoded, at most MAX_FRAMES; on a GPU downloaded and taken apart too."""
    with opener(path, None) as decoder:
        return sum(1 for _ in islice(decoder.frames(), MAX_FRAMES))


def whole_pass(path: Path, opener: Opener) -> int:
    """Frames of a pass for all consumers of the recipe `clips`, in this process, rows thrown away."""
    consumers = [Probe(), Frames(), Shots(ShotsParams(detector="hsv")), Quality()]
    done = run_pass(path, video_key="0" * 32, consumers=consumers, sink=lambda stage, row: None, opener=opener)
    return done.summary.num_frames


if __name__ == "__main__":
    sys.exit(main())
