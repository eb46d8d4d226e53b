"""Runs a unit under a worker's meter: the runner does not know it, and the report says what the meter saw."""

from __future__ import annotations

import dataclasses

from videoflow.telemetry.meter import Meter
from videoflow.unit import Unit, UnitReport
from workers.run_unit import UnitRunner


def run_watched(runner: UnitRunner, unit: Unit, meter: Meter) -> UnitReport:
    """The unit's report, with all that the worker has done until then.

    Raises:
        SystemFailure: as `UnitRunner.run`.
    """
    with meter.bound(), meter.span("other"):
        report = runner.run(unit)
    meter.count(units=1, items=report.items)
    return dataclasses.replace(report, worker=meter.snapshot())
