"""Time in integers: grid, chunks, sampling, snapping. Everything here is exact and nothing imports media libraries.

Integer pts in the stream's time base are the truth. Rates and time bases are fractions; microseconds are the floor of
the exact value; seconds (floats) appear only at the border to people. The rules are those of DESIGN.md, "Time and
pictures".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

MICRO = 1_000_000
#: A person's second is snapped to a pts within this many seconds (or half a step, if that is less).
SNAP_SECONDS = Fraction(1, 1000)
#: A stream is VFR if a step differs from the median by more than max(this, 10 %).
VFR_SECONDS = Fraction(2, 1000)
VFR_SHARE = Fraction(1, 10)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer ≥ a / b, for b > 0."""
    return -((-a) // b)


def round_half_up(x: Fraction) -> int:
    """Nearest integer, halves away from zero (x ≥ 0)."""
    return int((2 * x + 1) // 2)


def pts_to_us(pts: int, time_base: Fraction) -> int:
    """Microseconds (floor) of a pts."""
    return (pts * time_base.numerator * MICRO) // time_base.denominator


def pts_to_seconds(pts: int, time_base: Fraction) -> float:
    """Seconds as the nearest float to the exact value; never to be summed."""
    return pts * time_base.numerator / time_base.denominator


def lower_median(steps: Sequence[int]) -> int:
    """The lower median of a non-empty list of steps."""
    return sorted(steps)[(len(steps) - 1) // 2]


def steps_of(pts: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(pts)]


def is_vfr(pts: Sequence[int], time_base: Fraction) -> bool:
    """True if a step differs from the median step by more than max(2 ms, 10 %)."""
    steps = steps_of(pts)
    if not steps:
        return False
    median = lower_median(steps)
    allowed = max(VFR_SECONDS / time_base, VFR_SHARE * median)
    return any(abs(s - median) > allowed for s in steps)


@dataclass(frozen=True)
class Grid:
    """The grid of a rate on one stream: grid time k is ``start + k / rate`` seconds.

    Attributes:
        start_pts: first shown pts.
        time_base: seconds per pts unit.
        rate: grid points per second.
    """

    start_pts: int
    time_base: Fraction
    rate: Fraction

    def index_at_or_after(self, pts: int) -> int:
        """Smallest k whose grid time is ≥ pts (may be negative before the start)."""
        per_unit = self.time_base * self.rate
        return ceil_div((pts - self.start_pts) * per_unit.numerator, per_unit.denominator)

    def last_pts_at(self, k: int) -> int:
        """Largest integer pts that is ≤ grid time k."""
        per_unit = self.time_base * self.rate
        return self.start_pts + (k * per_unit.denominator) // per_unit.numerator

    def is_kept(self, pts: int, next_pts: int) -> bool:
        """True if some grid time lies in [pts, next_pts): this frame is then the last shown one at it."""
        return self.index_at_or_after(pts) < self.index_at_or_after(next_pts)

    def indices(self, t0_pts: int, t1_pts: int) -> range:
        """Grid indices whose times lie in the half-open interval [t0_pts, t1_pts)."""
        return range(max(0, self.index_at_or_after(t0_pts)), self.index_at_or_after(t1_pts))

    def frame_positions(self, cached_pts: Sequence[int], ks: Sequence[int]) -> list[int]:
        """For every grid index, the position in ``cached_pts`` (sorted) of the last pts ≤ its time; -1 if none."""
        return [bisect_right(cached_pts, self.last_pts_at(k)) - 1 for k in ks]


def chunk_of(pts: int, *, start_pts: int, time_base: Fraction, chunk_seconds: Fraction) -> int:
    """Number of the chunk [start + c·chunk, start + (c+1)·chunk) that holds a pts."""
    return int(((pts - start_pts) * time_base) // chunk_seconds)


def divisor_step(cache_rate: Fraction, rate: Fraction) -> int | None:
    """How many cache-grid steps make one step of ``rate``, or None if ``rate`` does not divide the cache's rate."""
    step = cache_rate / rate
    return int(step) if step.denominator == 1 else None


def snap_seconds(seconds: float | Fraction, pts: Sequence[int], time_base: Fraction) -> int:
    """Position in ``pts`` (sorted) of a person's stream time in seconds.

    A pts within min(1 ms, half a step) of the time is taken; else the last pts ≤ the time. -1 if the time lies before
    all of them. Source: DESIGN.md, "Seconds from people".
    """
    t = Fraction(seconds) / time_base
    step = lower_median(steps_of(pts)) if len(pts) > 1 else 1
    near = min(SNAP_SECONDS / time_base, Fraction(step, 2))
    i = bisect_right(pts, t) - 1
    best = [j for j in (i, i + 1) if 0 <= j < len(pts) and abs(pts[j] - t) <= near]
    return min(best, key=lambda j: abs(pts[j] - t)) if best else i


def exact_fraction(value: object) -> Fraction:
    """The exact number a person wrote; floats are read as their decimal text.

    Raises:
        ValueError: no number, or one so large or small that it can only be a mistake.
    """
    text = str(value).strip()
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > 40 or (exponent and abs(int(exponent)) > 30):
        raise ValueError(f"{text[:40]} is out of range")
    return Fraction(text)


def parse_rate(value: object) -> Fraction:
    """A rate from a recipe or a caller: 8, 29.97, "30000/1001". Floats are read as their decimal text."""
    rate = exact_fraction(value)
    if rate <= 0:
        raise ValueError(f"a rate must be above 0, not {value}")
    return rate
