"""Measuring: CPU seconds of process trees, peak memory, medians and intervals of ratios."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RESAMPLES, LEVEL = 10_000, 0.90


@dataclass(frozen=True)
class Run:
    """One run of a command. ``cpu_seconds``: user and system, of the process and all its children; ``peak_mb``: the
    largest resident size of one of them, MB (10^6 bytes), by the kernel's count.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_mb: float
    output: str


def run(command: Sequence[str], *, core: int | None, env: dict[str, str] | None = None, cwd: Path | None = None) -> Run:
    """Run a command to its end, on one core (None: wherever), and count the whole process tree.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    began = time.monotonic()
    with subprocess.Popen(
        [*pinned, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {output[-2000:]}")
    peak_mb = usage.ru_maxrss * 1024 / 1e6
    return Run(usage.ru_utime + usage.ru_stime, time.monotonic() - began, peak_mb, output)


def descendants(pid: int) -> list[int]:
    """A process and its living children, grandchildren, …"""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def tree_cpu_seconds(pid: int) -> float:
    """User and system time so far of a process, its living descendants, and those it has waited for."""
    ticks = 0
    for one in descendants(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(f) for f in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_peak_mb(pid: int) -> float:
    """Sum of the peak resident sizes of a process and its living descendants, MB (10^6 bytes): what they share is
    counted once for each.
    """
    kib = 0
    for one in descendants(pid):
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                kib += int(line.split()[1])
    return kib * 1024 / 1e6


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of alternating pairs, with the 90 % interval of that median (bootstrap, fixed seed)."""

    median: float
    low: float
    high: float


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Ratio of two sides measured in turns."""
    ratios = np.array(above) / np.array(below)
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high))
