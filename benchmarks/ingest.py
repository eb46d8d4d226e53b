"""How fast a video becomes cached frames and cuts, side by side with FFmpeg and with the usual two-pass script.

    python -m benchmarks.ingest [--quick] [--json] [--pairs N] [--only NAME]

Sides run in turns, one core each (two for two_workers_ratio). Times are CPU seconds of whole process trees; what a side
costs on a video of eight frames is its start-up and is taken off. Ratios are medians over the pairs, with the 90 %
interval of the median, and a bound holds if that interval does. Other sides: the scripts in
$VIDEOFLOW_REFERENCE/processing, unchanged (benchmarks/requirements.txt says what they need). See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import footage
from benchmarks.measure import Ratio, Run, ratio_of, run

REFERENCE = Path(os.environ.get("VIDEOFLOW_REFERENCE") or footage.REPOSITORY.parent / "shared" / "reference")
#: Figure: (bound, "≥" or "≤"), as promised.
BOUNDS = {
    "decode_only_ratio": (0.72, "≥"),
    "ffmpeg_ratio": (1.0, "≥"),
    "two_pass_ratio": (2.2, "≥"),
    "sandbox_overhead": (0.05, "≤"),
    "rss_mb": (700.0, "≤"),
    "two_workers_ratio": (1.8, "≥"),
    "embed_busy": (0.95, "≥"),
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    pairs: int
    startups: int
    pair_seconds: float
    worker_pairs: int
    worker_videos: int
    long_seconds: float


FULL = Size(pairs=15, startups=3, pair_seconds=42, worker_pairs=5, worker_videos=4, long_seconds=7200)
QUICK = Size(pairs=3, startups=1, pair_seconds=20, worker_pairs=1, worker_videos=4, long_seconds=600)


@dataclass(frozen=True)
class Figure:
    """One figure: a ratio with its interval, or a plain number."""

    name: str
    value: float
    low: float
    high: float
    detail: str

    @property
    def holds(self) -> bool:
        bound, side = BOUNDS[self.name]
        return self.low >= bound if side == "≥" else self.high <= bound


def of_ratio(name: str, ratio: Ratio, detail: str) -> Figure:
    return Figure(name, ratio.median, ratio.low, ratio.high, detail)


class Bench:
    """The videos, the cores and the sides."""

    def __init__(self, size: Size, cache: Path) -> None:
        self.size = size
        self.cache = cache
        self.cores = sorted(os.sched_getaffinity(0))
        self.pair = footage.folder_of(f"pair-{size.pair_seconds:.0f}", seconds=size.pair_seconds, cache=cache)
        self.start = footage.folder_of("start", seconds=8 / footage.FPS, cache=cache)
        self.long = footage.folder_of(f"long-{size.long_seconds:.0f}", seconds=size.long_seconds, cache=cache)
        self.frames = footage.num_frames(self.pair / "video.mp4")

    # -- sides -------------------------------------------------------------------------------------------------------

    def ours(
        self, *options: str, folder: Path | None = None, core: int | None = -1, name: str = "ours"
    ) -> dict[str, Any]:
        """Our pass, start-up apart."""
        out = self.cache / f"out-{name}"
        command = [sys.executable, "-m", "benchmarks.pass_side", str(folder or self.pair), str(out), *options]
        done = run(command, core=self.cores[0] if core == -1 else core, cwd=footage.REPOSITORY)
        measured: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        if measured["bad"]:
            raise RuntimeError(f"our side failed: {measured['bad']}")
        shutil.rmtree(out, ignore_errors=True)
        return measured

    def theirs(self, script: str, mode: str, folder: Path) -> Run:
        """A reference side, unchanged, start-up included."""
        out = self.cache / "out-theirs"
        path = REFERENCE / "processing" / script
        if not path.is_file():
            raise SystemExit(
                f"no reference side at {path}: set VIDEOFLOW_REFERENCE to the folder that holds processing/"
            )
        command = [sys.executable, str(path), mode, str(folder), str(out)]
        done = run(command, core=self.cores[0], env={"BENCH": str(self.cache)})
        if script == "b_plain.py" or mode == "full":
            report = next((line for line in done.output.splitlines() if line.startswith("REPORT ")), None)
            if report is None or not json.loads(report.removeprefix("REPORT "))["jpegs"]:
                raise RuntimeError(f"{script} wrote no frames: {done.output[-2000:]}")
        return done

    # -- figures -----------------------------------------------------------------------------------------------------

    def pass_figures(self) -> list[Figure]:
        """Our pass in its sandbox and without it, FFmpeg's decoding, the one-pass script, the two-pass script. What
        is compared at a close bound runs side by side: a shared machine is faster in one minute than in the next.
        """
        sides: dict[str, Callable[[Path], float]] = {
            "null": lambda folder: self.theirs("a_ffmpeg.py", "null", folder).cpu_seconds,
            "ours": lambda folder: self.ours(folder=folder)["cpu_seconds"],
            "full": lambda folder: self.theirs("a_ffmpeg.py", "full", folder).cpu_seconds,
            "bare": lambda folder: self.ours("--bare", folder=folder)["cpu_seconds"],
            "plain": lambda folder: self.theirs("b_plain.py", "torchcodec", folder).cpu_seconds,
        }
        startup = {
            name: median(side(self.start) for _ in range(self.size.startups))
            for name, side in sides.items()
            if name not in OWN
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(self.size.pairs):
            order = list(sides) if turn % 2 == 0 else list(reversed(sides))
            for name in order:
                seconds[name].append(sides[name](self.pair) - startup.get(name, 0.0))
        rates = {name: self.frames / median(s) for name, s in seconds.items()}
        shown = {name: f"{rate:.0f}" for name, rate in rates.items()}
        overhead = ratio_of(seconds["ours"], seconds["bare"])
        return [
            of_ratio(
                "decode_only_ratio",
                ratio_of(seconds["null"], seconds["ours"]),
                f"{shown['ours']} frames/s, FFmpeg decoding only {shown['null']}",
            ),
            of_ratio(
                "ffmpeg_ratio",
                ratio_of(seconds["full"], seconds["ours"]),
                f"one-pass ffmpeg script {shown['full']} frames/s",
            ),
            of_ratio(
                "two_pass_ratio",
                ratio_of(seconds["plain"], seconds["ours"]),
                f"PySceneDetect, then torchcodec {shown['plain']} frames/s",
            ),
            Figure(
                "sandbox_overhead",
                overhead.median - 1,
                overhead.low - 1,
                overhead.high - 1,
                f"without sandbox {shown['bare']} frames/s",
            ),
        ]

    def memory(self, core: int | None) -> Figure:
        """Peak of a worker and its decoding child on a long video."""
        peak = self.ours(folder=self.long, core=core, name="long")["peak_mb"]
        minutes = self.size.long_seconds / 60
        return Figure("rss_mb", peak, peak, peak, f"worker and child, {minutes:.0f} minutes of 720p")

    def two_workers(self) -> Figure:
        """A few videos by one worker and by two, wall time after their start; only idle cores can show it."""
        if len(self.cores) < 2:
            return Figure("two_workers_ratio", 0.0, 0.0, 0.0, "needs two cores")
        walls: dict[int, list[float]] = {1: [], 2: []}
        cpus: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(self.size.worker_pairs):
            for workers in (1, 2) if turn % 2 == 0 else (2, 1):
                options = ("--workers", str(workers), "--times", str(self.size.worker_videos))
                measured = self.ours(*options, core=None)
                walls[workers].append(measured["wall_seconds"])
                cpus[workers].append(measured["cpu_seconds"])
        (w1, w2), (c1, c2) = ([median(x[n]) for n in (1, 2)] for x in (walls, cpus))
        detail = f"wall {w1:.1f} s and {w2:.1f} s, CPU {c1:.1f} s and {c2:.1f} s"
        return of_ratio("two_workers_ratio", ratio_of(walls[1], walls[2]), detail)

    def embedding(self, core: int) -> Figure:
        """Share of the backfill's time that the model alone would take."""
        command = [sys.executable, "-m", "benchmarks.embed_side", str(self.pair), str(self.cache / "out-embed")]
        done = run(command, core=core, cwd=footage.REPOSITORY)
        measured = json.loads(done.output.splitlines()[-1])
        bare, backfill, frames = measured["bare_seconds"], measured["backfill_seconds"], measured["frames"]
        detail = f"{frames / sum(backfill):.1f} frames/s, bare forward {frames / sum(bare):.1f}"
        return of_ratio("embed_busy", ratio_of(bare, backfill), detail)


#: Sides that take their start-up off themselves.
OWN = ("ours", "bare")


def measure(bench: Bench, *, quick: bool, only: str | None) -> list[Figure]:
    """All figures, or those of one step: pass, memory, workers, embed. A quick run measures memory and embedding on the
    second core meanwhile.
    """
    steps: dict[str, Callable[[], list[Figure]]] = {
        "pass": bench.pass_figures,
        "workers": lambda: [bench.two_workers()],
        "embed": lambda: [bench.embedding(bench.cores[0])],
        "memory": lambda: [bench.memory(bench.cores[0])],
    }
    if only:
        return steps[only]()
    beside: list[Figure] = []
    thread, measures = None, (bench.embedding, bench.memory)
    if quick and len(bench.cores) > 1:
        del steps["memory"], steps["embed"]
        thread = threading.Thread(target=lambda: beside.extend(m(bench.cores[1]) for m in measures))
        thread.start()
    figures = steps["pass"]()
    if thread is not None:
        thread.join()
        if len(beside) < len(measures):
            raise RuntimeError("a step beside the pass failed, see above")
    figures += beside
    for name in ("embed", "memory", "workers"):
        figures += steps[name]() if name in steps else []
    return figures


def show(figures: Sequence[Figure]) -> None:
    """A table for people."""
    table = Table("figure", "value", "90 % interval", "bound", "holds", "beside it", title="ingest, 720p H.264")
    for f in figures:
        bound, side = BOUNDS[f.name]
        digits = 0 if f.name == "rss_mb" else 3
        interval = f"{f.low:.{digits}f} … {f.high:.{digits}f}" if f.low != f.high else "–"
        holds = "yes" if f.holds else "NO"
        table.add_row(f.name, f"{f.value:.{digits}f}", interval, f"{side} {bound:g}", holds, f.detail)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.ingest", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--quick", action="store_true", help="3 pairs on short videos; rough, within 3 minutes")
    p.add_argument("--pairs", type=int, help="alternating pairs (15, quick: 3)")
    p.add_argument("--only", choices=["pass", "workers", "embed", "memory"], help="one step")
    p.add_argument("--cache", type=Path, default=footage.CACHE, help="folder for the videos; made once")
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object, last")
    o = p.parse_args()
    size = QUICK if o.quick else FULL
    if o.pairs:
        size = replace(size, pairs=o.pairs)
    figures = measure(Bench(size, o.cache), quick=o.quick, only=o.only)
    show(figures)
    if o.json:
        print(json.dumps({f.name: round(f.value, 4) for f in figures}))


if __name__ == "__main__":
    main()
