"""Killing a job's processes at random moments, of every kind as often as asked for, and counting the hits."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import psutil

#: What can be killed: by a piece of its command line; the driver is the job's own process.
MARKS = {"sandbox": "spawn_main", "actor": "ray::MapWorker", "idle ray worker": "ray::IDLE", "raylet": "raylet/raylet"}
DRIVER = "driver"
#: A sandbox's child that dies three times over one video is held against it, so no run loses more than two.
SANDBOX_KILLS_A_RUN = 2
Target = tuple[str, str]  # (kind, stage it is to be hit in)


class _Run:
    """One `videoflow run` in a process of its own; ``stage`` is where it says it is."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str] | None) -> None:
        command = [sys.executable, "-m", "videoflow.cli.main", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environ) if environ else None,
        )
        self.stage, self.lines = "", []
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self.stage = line.split(":", 1)[0]

    def find(self, kind: str) -> psutil.Process | None:
        try:
            driver = psutil.Process(self.process.pid)
            if kind == DRIVER:
                return driver
            found = [p for p in driver.children(recursive=True) if MARKS[kind] in " ".join(_command(p))]
        except psutil.Error:
            return None
        return found[0] if found else None

    def hit(self, target: Target, chance: random.Random) -> bool:
        """Kill -9 a process of this kind in this stage; False if the job ended first."""
        kind, stage = target
        while self.process.poll() is None:
            if self.stage == stage and self.find(kind):
                time.sleep(chance.uniform(0, 1))
                victim = self.find(kind)
                if victim is not None and self.stage == stage and self.process.poll() is None:
                    tree = _tree(self.process.pid)
                    victim.kill()
                    if kind in (DRIVER, "raylet"):
                        self.process.wait(300)
                        psutil.wait_procs(tree, timeout=60)
                    return True
            time.sleep(0.02)
        return False


def rampage(
    arguments: Callable[[int], list[str]],
    wanted: Mapping[Target, int],
    *,
    seed: int,
    check: Callable[[int], None],
    environ: Mapping[str, str] | None = None,
) -> Counter[Target]:
    """Run jobs and kill their processes until every target was hit as often as wanted.

    Args:
        arguments: of `videoflow` for the n-th catalog; a catalog is used until a run over it gets to its end.
        check: called with n when the n-th catalog is complete.
    """
    chance, hits, catalog, complete = random.Random(seed), Counter[Target](), 0, True
    while any(hits[t] < n for t, n in wanted.items()):
        run, lost, ends = _Run(arguments(catalog), environ), 0, {0, 4, -9}
        while run.process.poll() is None:
            open_ = [t for t, n in wanted.items() if hits[t] < n and (t[0] != "sandbox" or lost < SANDBOX_KILLS_A_RUN)]
            if not open_:
                break
            # A driver's death ends the run: others first, where they come first.
            target = min(chance.sample(open_, len(open_)), key=lambda t: t[0] == DRIVER and chance.random() < 0.5)
            if run.hit(target, chance):
                hits[target] += 1
                lost += target[0] == "sandbox"
                ends |= {1} if target[0] == "raylet" else set()  # where Ray ends its own driver
        code = run.process.wait(600)
        complete = code == 0
        run.listener.join(30)
        assert code in ends, (code, run.lines[-3:])  # done, stopped by a dead worker or dead itself: never broken
        assert code in (0, -9) or "run the same command again to resume" in " ".join(run.lines), (code, run.lines)
        if complete:
            check(catalog)
            catalog += 1
    if not complete:  # the last kill ended its run
        check(catalog)
    return hits


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
