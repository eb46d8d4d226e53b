"""Where the time goes: spans at our own stage edges, and what a trainer's waits were spent on."""

from videoflow.telemetry.spans import SpanRing
from videoflow.telemetry.stall import StallMeter, StallReport

__all__ = ["SpanRing", "StallMeter", "StallReport"]
