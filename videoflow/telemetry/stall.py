"""The trainer's waits: how long, when, and for what. Measured on the trainer's side, around ``next``.

A wait is split over the stages by walking back from the delivery: while the trainer waits for a batch, everything
before it has been delivered, so the batch's own path is the critical one. Each nanosecond of the wait goes to the stage
the batch was in at that time, or to ``queue`` where it was in none (it lay ready, or a thread had yet to wake up).
Times are integers, so the parts sum to the whole exactly. Host time only: what the loader costs the GPU, and what its
threads cost the trainer's own step (interference), belong to later issues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from videoflow.telemetry.spans import STAGES, Span, SpanRing

#: Kinds of waits: for the very first batch after a start, for the first batch of a further epoch, and all others.
WAITS = ("first_batch", "epoch_turn", "steady")
#: Below this share of the time the loader is said to keep up.
FINE_SHARE = 0.02

REMEDIES = {
    "plan": "working out batches takes too long, which should not happen: please report it with "
    "loader.report().to_dict()",
    "read": "storage is slower than the trainer: raise prefetch=, bring the catalog nearer, or take fewer frames "
    "(frames=, fps=)",
    "queue": "batches lay ready while threads could not run: the machine's CPUs are busy, so give this process "
    "more of them or fewer threads",
    "decode": "decoding is slower than the trainer: raise threads= while CPUs are idle, use engine='dali' with "
    "device='cuda', or fewer frames",
    "copy": "handing tensors to the device is slower than the trainer: decode there with engine='dali', or ask "
    "for a smaller size=",
    "transform": "your transform is slower than the trainer: do it on the GPU inside the training step, or make "
    "it cheaper",
}


def attribute_wait(start_ns: int, end_ns: int, spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of the wait [start_ns, end_ns) by stage; they sum to end_ns − start_ns exactly.

    Args:
        spans: of the batch that was waited for; where they overlap, the later one counts.
    """
    parts = dict.fromkeys(STAGES, 0)
    at = end_ns
    for span in sorted(spans, key=lambda s: s.end_ns, reverse=True):
        high, low = min(span.end_ns, at), max(span.start_ns, start_ns)
        if low >= high:
            continue
        parts["queue"] += at - high
        parts[span.stage] += high - low
        at = low
    parts["queue"] += max(0, at - start_ns)
    return parts


@dataclass(frozen=True)
class StallReport:
    """What the trainer's waits were spent on. All times are nanoseconds of host time.

    Attributes:
        num_batches: delivered batches.
        wall_ns: from the first call of ``next`` to the last delivery.
        set_up_ns: making the loader and starting its threads.
        waits: by kind of wait and stage; the parts of a kind sum to its whole.
    """

    num_batches: int
    wall_ns: int
    set_up_ns: int
    waits: dict[str, dict[str, int]]

    def wait_ns(self, kind: str) -> int:
        """The whole of one kind of wait."""
        return sum(self.waits[kind].values())

    @property
    def stall_ns(self) -> int:
        """All waits after the first batch."""
        return self.wait_ns("steady") + self.wait_ns("epoch_turn")

    @property
    def stall_share(self) -> float:
        """Stall over the time since the first batch was delivered; 0 while there is none."""
        running_ns = self.wall_ns - self.wait_ns("first_batch")
        return self.stall_ns / running_ns if running_ns > 0 else 0.0

    @property
    def main_cause(self) -> str | None:
        """The stage that most of the stall was spent in; None without a stall."""
        if not self.stall_ns:
            return None
        parts = {s: self.waits["steady"][s] + self.waits["epoch_turn"][s] for s in STAGES}
        return max(parts, key=lambda s: parts[s])

    @property
    def verdict(self) -> str:
        """One or two plain sentences: how much of the time was lost, to what, and what to do."""
        if self.num_batches < 2:
            return "Too early to say: fewer than two batches were delivered."
        waited = f"{100 * self.stall_share:.1f} % of its time ({self.stall_ns / 1e9:.2f} s"
        lost = f"The trainer waited {waited} over {self.num_batches - 1} batches)"
        cause = self.main_cause
        if cause is None or self.stall_share < FINE_SHARE:
            return f"{lost}: the loader keeps up."
        share = sum(self.waits[k][cause] for k in ("steady", "epoch_turn")) / self.stall_ns
        return f"{lost}, {100 * share:.0f} % of that for {cause}. What to do: {REMEDIES[cause]}."

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text, for JSON."""
        return {
            "num_batches": self.num_batches,
            "wall_ns": self.wall_ns,
            "set_up_ns": self.set_up_ns,
            "stall_ns": self.stall_ns,
            "stall_share": self.stall_share,
            "main_cause": self.main_cause,
            "waits_ns": {kind: dict(parts) for kind, parts in self.waits.items()},
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        lines = [self.verdict, f"  set-up {self.set_up_ns / 1e9:.3f} s"]
        for kind in WAITS:
            shown = ", ".join(f"{s} {ns / 1e9:.3f}" for s, ns in self.waits[kind].items() if ns)
            lines.append(f"  {kind.replace('_', ' ')} {self.wait_ns(kind) / 1e9:.3f} s{f' ({shown})' if shown else ''}")
        return "\n".join(lines)


@dataclass
class StallMeter:
    """Adds up the trainer's waits; used from the trainer's thread only."""

    ring: SpanRing
    set_up_ns: int = 0
    num_batches: int = 0
    _first_ns: int | None = None
    _last_ns: int = 0
    _waits: dict[str, dict[str, int]] = field(default_factory=lambda: {k: dict.fromkeys(STAGES, 0) for k in WAITS})

    def delivered(self, batch: int, kind: str, start_ns: int, end_ns: int | None = None) -> None:
        """A batch was handed over.

        Args:
            batch: its number in the ring.
            kind: one of WAITS.
            start_ns: when ``next`` began to wait.
            end_ns: when the batch was there; now, if not given.
        """
        end_ns = time.perf_counter_ns() if end_ns is None else end_ns
        for stage, ns in attribute_wait(start_ns, end_ns, self.ring.of_batch(batch)).items():
            self._waits[kind][stage] += ns
        self._first_ns = start_ns if self._first_ns is None else self._first_ns
        self._last_ns = end_ns
        self.num_batches += 1

    def report(self) -> StallReport:
        wall_ns = 0 if self._first_ns is None else self._last_ns - self._first_ns
        return StallReport(self.num_batches, wall_ns, self.set_up_ns, {k: dict(p) for k, p in self._waits.items()})
