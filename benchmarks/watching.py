"""What the watch costs: the decode pass with timed riders and without, in turns, and the driver's side. CPU time.

    python -m benchmarks.watching VIDEO [--pairs N] [--json]

``pass_overhead``: share of CPU seconds that timing adds to a pass with frame cache, shots and quality (median of
pairs; noisy where others use the machine). ``frame_us``: what timing does to one frame with five riders that do
nothing; ``frame_overhead``: that over the CPU time of one frame of the pass. ``sample_ms``: one sample of a job with 2
and with 1,000 workers. ``unit_us``: a worker's clock for one unit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videoflow.recipe import Recipe
from videoflow.stage import PassConsumer
from videoflow.telemetry.meter import Meter
from videoflow.telemetry.watch import JobWatch
from workers.child_meter import ChildMeter, PassClock
from workers.decode import run_pass

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "quality": {}})
SAMPLES, UNITS, FRAMES = 50, 2000, 20_000


def cpu_seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def consumers() -> list[PassConsumer]:
    return [b.stage for b in RECIPE.build() if isinstance(b.stage, PassConsumer)]


def plain(video: Path) -> int:
    done = run_pass(video, video_key="0" * 32, consumers=consumers(), sink=lambda stage, row: None)
    return done.summary.num_frames


def timed(video: Path) -> None:
    clock = PassClock(ChildMeter(multiprocessing.get_context("spawn")).shared)
    riders, sink = clock.ride(consumers()), clock.sink(lambda stage, row: None)
    with clock.passing():
        run_pass(video, video_key="0" * 32, consumers=riders, sink=sink)


class Idle:
    """A rider that does nothing."""

    name = "idle"

    def see(self, frame: object) -> None: ...


def frame_us() -> float:
    """What five timed riders cost a frame, over five plain ones."""
    clock = PassClock(ChildMeter(multiprocessing.get_context("spawn")).shared)
    riders: list[Any] = [Idle() for _ in range(5)]

    def frames(all_of_them: list[Any]) -> None:
        for _ in range(FRAMES):
            for r in all_of_them:
                for _row in r.see(None) or ():
                    pass

    with clock.passing():
        without, timed_riders = cpu_seconds(lambda: frames(riders)), clock.ride(riders)
        return (cpu_seconds(lambda: frames(timed_riders)) - without) / FRAMES * 1e6


class Workers:
    """An engine with many workers, all of them in the middle of something."""

    def __init__(self, count: int) -> None:
        self._meters = [Meter(str(i), str(i)) for i in range(count)]
        for m in self._meters:
            one_unit(m)

    def watch(self) -> list[object]:
        return [m.snapshot() for m in self._meters]


def one_unit(meter: Meter) -> None:
    """About the turns of a unit: four states in and out, three of them inside another."""
    with meter.bound(), meter.span("other"):
        for state in ("fetch", "decode", "write", "write"):
            with meter.span(state):
                pass
    meter.count(units=1)
    meter.snapshot()


def sample_ms(workers: int) -> float:
    watch, engine = JobWatch(), Workers(workers)
    reports = watch.reports(engine, "decode", "videos", [None] * workers, iter([_Report()]))
    next(reports)  # the stage runs from here on

    def samples() -> None:
        for _ in range(SAMPLES):
            watch._collect()
            json.dumps(watch.figures().to_dict())

    return cpu_seconds(samples) / SAMPLES * 1e3


class _Report:
    items, worker = 1, None


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("video", type=Path)
    p.add_argument("--pairs", type=int, default=7)
    p.add_argument("--json", action="store_true")
    o = p.parse_args()
    num_frames, _ = plain(o.video), timed(o.video)
    ratios, plain_seconds = [], []
    for i in range(o.pairs):
        sides = [timed, plain] if i % 2 else [plain, timed]
        seconds = {side: cpu_seconds(lambda side=side: side(o.video)) for side in sides}
        ratios.append(seconds[timed] / seconds[plain] - 1)
        plain_seconds.append(seconds[plain])
    meter = Meter("k", "w")
    unit_us = cpu_seconds(lambda: [one_unit(meter) for _ in range(UNITS)]) / UNITS * 1e6
    one_frame, its_pass = frame_us(), statistics.median(plain_seconds) / num_frames * 1e6
    result = {
        "frame_us": round(one_frame, 2),
        "frame_overhead": round(one_frame / its_pass, 4),
        "pass_overhead": round(statistics.median(ratios), 4),
        "pass_overhead_pairs": [round(r, 4) for r in sorted(ratios)],
        "sample_ms": {n: round(sample_ms(n), 2) for n in (2, 1000)},
        "unit_us": round(unit_us, 1),
    }
    print(json.dumps(result) if o.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
