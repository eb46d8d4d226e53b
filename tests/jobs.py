"""Running jobs in tests: quiet, on the local engine unless told."""

from __future__ import annotations

import os
from collections.abc import Sequence

from videoflow.execute import JobOptions, JobSummary
from videoflow.job import Job
from videoflow.recipe import Recipe
from videoflow.unit import UnitReport


class Quiet:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[tuple[str, int]] = []

    def begin(self, stage: str, total: int, unit: str) -> None:
        self.begun.append((stage, total))

    def advance(self, stage: str, report: UnitReport) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


def run_job(
    recipe: Recipe,
    sources: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    *,
    name: str = "x",
    engine: str = "local",
    workers: int = 2,
    progress: Quiet | None = None,
) -> JobSummary:
    options = JobOptions(engine=engine, workers=workers, max_quarantined=1.0)
    job = Job(
        recipe,
        [os.fspath(s) for s in sources],
        root=os.fspath(root),
        name=name,
        options=options,
        progress=progress or Quiet(),
    )
    return job.run()
