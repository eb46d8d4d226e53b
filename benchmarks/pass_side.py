"""Our side of the ingest benchmark, in a process of its own: probe, HSV cuts on all frames, 256 px JPEG of every third
frame, Lance fragments. Prints one JSON object as its last line.

    python -m benchmarks.pass_side FOLDER OUT [--bare] [--workers N] [--times N]

Each worker is warmed up with a clip of six frames first; start-up is counted apart. ``--bare`` decodes in the worker's
own process, to see what the sandbox costs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import tree_cpu_seconds, tree_peak_mb
from videoflow.fingerprint import fingerprint
from videoflow.stage import PassConsumer
from videoflow.store.commit import UnitRecord
from videoflow.store.layout import Root
from videoflow.store.writer import ensure_target
from videoflow.unit import DecodeItem, StageWork, Unit
from workers import sandbox
from workers.canary import canary_paths
from workers.child_meter import ChildMeter, PassClock
from workers.frames import Frames, FramesParams
from workers.probe import Probe
from workers.run_unit import UnitRunner
from workers.shots import Shots, ShotsParams


class NoSandbox(sandbox.Sandbox):
    """Decodes where it is called, with the code that runs in the sandbox's child."""

    def __init__(self) -> None:
        sandbox._HEARTBEAT = ctypes.c_int64(0)  # what the child would count frames in
        sandbox._CLOCK = PassClock(ChildMeter(multiprocessing).shared)

    def run(self, function: Callable[..., Any], *task: Any, riders: Sequence[str] = ()) -> Any:
        return function(*task)

    def kill(self) -> None: ...

    def close(self) -> None: ...


def works(root: Root) -> tuple[StageWork, ...]:
    """Three products of one pass; at 24 frames/s a grid of 8 keeps every third frame."""
    stages: list[PassConsumer] = [Probe(), Shots(ShotsParams(detector="hsv")), Frames(FramesParams(fps="8"))]
    made = []
    for stage in stages:
        fp = fingerprint(stage)
        target = ensure_target(root, stage=stage.name, fingerprint=fp, table=stage.table, schema=stage.schema())
        made.append(StageWork(stage, fp, target))
    return tuple(made)


def unit_of(path: Path, root: Root, work: tuple[StageWork, ...]) -> Unit:
    """One video as one unit; the key is drawn, so that one file can stand for many videos."""
    info = path.stat()
    item = DecodeItem(secrets.token_hex(16), str(path), path.name, info.st_size, f"mtime:{info.st_mtime_ns}")
    return Unit(work, (item,), root, "benchmark")


def runner(*, bare: bool) -> UnitRunner:
    made = UnitRunner()
    if bare:
        import cv2

        cv2.setNumThreads(1)  # as the sandbox's child does
        made._sandbox = NoSandbox()
    return made


def run(folder: Path, out: Path, *, bare: bool, workers: int, times: int) -> dict[str, Any]:
    """Every video of the folder, ``times`` over, by so many workers; what was measured after their start."""
    shutil.rmtree(out, ignore_errors=True)
    root = Root.at(out)
    work = works(root)
    runners = [runner(bare=bare) for _ in range(workers)]
    warm_up = next(p for p in canary_paths() if p.stem == "h264_8bit_limited")
    for one in runners:
        one.run(unit_of(warm_up, root, work))
    todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for _ in range(times):
        for path in sorted(folder.glob("*.mp4")):
            todo.put(unit_of(path, root, work))
    records: list[UnitRecord] = []
    frames: list[int] = []

    def drain(one: UnitRunner) -> None:
        while True:
            try:
                report = one.run(todo.get_nowait())
            except queue.Empty:
                return
            records.extend(report.records)
            frames.append(report.frames_decoded)

    startup_cpu, began = tree_cpu_seconds(os.getpid()), time.monotonic()
    threads = [threading.Thread(target=drain, args=(one,)) for one in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured = {
        "frames": sum(frames),
        "cpu_seconds": tree_cpu_seconds(os.getpid()) - startup_cpu,
        "wall_seconds": time.monotonic() - began,
        "startup_cpu_seconds": startup_cpu,
        "peak_mb": tree_peak_mb(os.getpid()),
        "frames_table_bytes": sum(p.stat().st_size for p in (out / "frames").rglob("*") if p.is_file()),
        "bad": [item.reason for record in records for item in record.items if item.state != "done"],
    }
    for one in runners:
        one.close()
    return measured


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--bare", action="store_true")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--times", type=int, default=1)
    o = p.parse_args()
    print(json.dumps(run(o.folder, o.out, bare=o.bare, workers=o.workers, times=o.times)))


if __name__ == "__main__":
    main()
