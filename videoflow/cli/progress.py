"""What a user sees while a job runs: live bars on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from videoflow.errors import printable_text
from videoflow.telemetry.metrics import JobFigures
from videoflow.unit import UnitReport

#: Without a terminal, a line at most this often.
LINE_SECONDS = 10.0


def say(text: str) -> None:
    """A line of the answer, on stdout; what would steer the terminal is shown as an escape."""
    print(printable_text(text, keep="\n\t"))


def now_line(figures: JobFigures) -> str:
    """What the stage that runs is doing, in a few words; empty between stages."""
    stage = figures.running
    if stage is None or not stage.worker_seconds:
        return ""
    largest = sorted(stage.states.items(), key=lambda p: -p[1])[:2]
    told = [f"{stage.frames_per_second:.0f} frames/s"] if stage.frames else []
    told += [f"{name.replace('_', ' ')} {seconds / stage.worker_seconds:.0%}" for name, seconds in largest if seconds]
    return ", ".join(told)


class _Stage:
    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit = total, unit
        self.done = self.frames = self.quarantined = 0
        self.began = self.said = time.monotonic()

    def add(self, report: UnitReport) -> None:
        self.done += report.items
        self.frames += report.frames_decoded
        self.quarantined += report.quarantined

    def rates(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-6)
        parts = [f"{self.done / seconds:.1f} {self.unit}/s"]
        if self.frames:
            parts.append(f"{self.frames / seconds:.0f} frames/s")
        if self.quarantined:
            parts.append(f"{self.quarantined} quarantined")
        return ", ".join(parts)


class LineProgress:
    """For logs and pipes."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}

    def begin(self, stage: str, total: int, unit: str) -> None:
        self._stages[stage] = _Stage(total, unit)
        self.note(f"{stage}: {total} {unit}")

    def advance(self, stage: str, report: UnitReport) -> None:
        s = self._stages[stage]
        s.add(report)
        now = time.monotonic()
        if now - s.said >= LINE_SECONDS or (s.done >= s.total and stage != "sources"):
            s.said = now
            left = (now - s.began) / max(s.done, 1) * max(s.total - s.done, 0)
            self.note(
                f"{stage}: {s.done}/{s.total} {s.unit}, {s.rates()}" + (f", {left:.0f} s left" if left >= 1 else "")
            )

    def watched(self, figures: JobFigures) -> None:
        """Between reports too, so that a long unit does not look like a hang."""
        running = figures.running
        s = self._stages.get(running.stage) if running else None
        now = time.monotonic()
        if s is not None and now - s.said >= LINE_SECONDS and (told := now_line(figures)):
            s.said = now
            self.note(f"{running.stage if running else ''}: {s.done}/{s.total} {s.unit}; {told}")

    def note(self, message: str) -> None:
        print(printable_text(message, keep="\n\t"), file=sys.stderr, flush=True)


class BarProgress:
    """For terminals."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._stages: dict[str, tuple[_Stage, TaskID]] = {}

    def begin(self, stage: str, total: int, unit: str) -> None:
        task = self._bars.add_task(stage, total=total, rates="")
        self._stages[stage] = (_Stage(total, unit), task)

    def advance(self, stage: str, report: UnitReport) -> None:
        s, task = self._stages[stage]
        s.add(report)
        self._bars.update(task, completed=s.done, rates=s.rates())

    def watched(self, figures: JobFigures) -> None:
        """The stage that runs, as it is of late."""
        running = figures.running
        if running is not None and running.stage in self._stages and (told := now_line(figures)):
            s, task = self._stages[running.stage]
            bad = f", {s.quarantined} quarantined" if s.quarantined else ""
            self._bars.update(task, rates=f"{running.items_per_second:.1f} {s.unit}/s, {told}{bad}")

    def note(self, message: str) -> None:
        self._bars.console.print(printable_text(message, keep="\n\t"), markup=False, highlight=False)


@contextmanager
def make_progress() -> Iterator[LineProgress | BarProgress]:
    """Bars where stderr is a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield LineProgress()
        return
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield BarProgress(bars)
