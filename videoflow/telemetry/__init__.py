"""Where the time goes: a trainer's waits by the loader's stages, and a job's time by its workers' states."""

from videoflow.telemetry.spans import SpanRing
from videoflow.telemetry.stall import StallMeter, StallReport
from videoflow.telemetry.watch import JobWatch

__all__ = ["JobWatch", "SpanRing", "StallMeter", "StallReport"]
