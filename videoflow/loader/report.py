"""What a loader says about itself: clips in and out, batches, and where the trainer's waits went, in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from videoflow.telemetry.stall import StallReport


@dataclass(frozen=True)
class LoaderReport:
    """A loader's figures so far.

    Attributes:
        version: ``name@n``.
        engine: the engine in use, ``"cpu"`` or ``"dali"``.
        num_clips: clips in the order of an epoch.
        num_short: clips with fewer frames than asked for (padded, or left out with short="skip").
        num_left_out: clips that were left out before ordering: too short, or without a cached frame.
        num_enlarged: clips whose pictures are made larger than they were cached.
        steps_per_epoch: global steps.
        num_batches: batches delivered by this loader object.
        stall: the trainer's waits.
    """

    version: str
    engine: str
    num_clips: int
    num_short: int
    num_left_out: int
    num_enlarged: int
    steps_per_epoch: int
    num_batches: int
    stall: StallReport

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text, for JSON."""
        return {**{k: v for k, v in vars(self).items() if k != "stall"}, "stall": self.stall.to_dict()}

    def __str__(self) -> str:
        lines = [
            f"{self.version}: {self.num_clips} clips, {self.steps_per_epoch} steps an epoch, engine {self.engine}, "
            f"{self.num_batches} batches delivered"
        ]
        if self.num_left_out:
            lines.append(f"  {self.num_left_out} clips are left out: they have too few cached frames")
        if self.num_short > 0 and self.num_left_out < self.num_short:
            lines.append(
                f"  {self.num_short} clips are shorter than asked for; their last frame repeats (see frame_valid)"
            )
        if self.num_enlarged:
            lines.append(
                f"  {self.num_enlarged} clips are enlarged beyond their cached size; a smaller size= would lose nothing"
            )
        return "\n".join([*lines, str(self.stall)])
