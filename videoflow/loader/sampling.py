"""Which frames of a clip a loader takes: counts and steps on the cache's grid, in integers.

A clip owns the grid times first_grid, first_grid + 1, … (grid_count of them) of its cache's rate; frame k of a loader's
rate is the one at grid index first_grid + k·step. Clips are sampled from their start. Source: DESIGN.md, "Sampling from
the cache".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from videoflow.errors import LoaderError, shown
from videoflow.timeline import divisor_step, parse_rate

_PATTERN = re.compile(r"([0-9]{1,9})\+([0-9]{1,9})k")
#: A sample has at most this many frames; one that no clip can fill (its last frame repeats) has at most the second.
MAX_FRAMES, MAX_PADDED_FRAMES = 1_000_000, 1024
#: Rates are worked out in 64-bit integers.
MAX_RATE_PART = 1 << 31
SHORT = ("pad", "skip", "error")


@dataclass(frozen=True)
class FrameCount:
    """How many frames a sample has: ``base`` of them, or the largest base + k·step (k ≥ 0) that fits where step > 0."""

    base: int
    step: int = 0

    @staticmethod
    def parse(frames: object) -> FrameCount:
        """A count from ``frames=``: an integer, or text like ``"1+8k"``.

        Raises:
            LoaderError: neither of them.
        """
        if isinstance(frames, (int, np.integer)) and not isinstance(frames, bool) and 1 <= frames <= MAX_FRAMES:
            return FrameCount(int(frames))
        if isinstance(frames, str) and frames == "whole":
            raise LoaderError(
                "frames='whole' is not there yet; give a number of frames, or '1+8k' for the largest such count "
                "that fits"
            )
        found = _PATTERN.fullmatch(frames.replace(" ", "")) if isinstance(frames, str) else None
        counts = [int(found[i]) for i in (1, 2)] if found else []
        if not counts or not all(1 <= c <= MAX_FRAMES for c in counts):
            raise LoaderError(
                f"frames={shown(frames)} cannot be used; allowed are a whole number from 1 to {MAX_FRAMES}, or a "
                "text like '1+8k'"
            )
        return FrameCount(*counts)

    @property
    def option(self) -> int | str:
        """As it is written in ``frames=``."""
        return f"{self.base}+{self.step}k" if self.step else self.base

    def take(self, available: np.ndarray) -> np.ndarray:
        """Frames to take of clips that have ``available`` ones: int64 of the same shape; ``base`` where fewer are
        there.
        """
        if not self.step:
            return np.full_like(available, self.base)
        return self.base + np.maximum(available - self.base, 0) // self.step * self.step


def parse_fps(fps: object) -> Fraction | None:
    """A rate from ``fps=``; None stays None, the cache's own.

    Raises:
        LoaderError: no rate above 0.
    """
    try:
        return None if fps is None else parse_rate(fps)
    except (ValueError, ZeroDivisionError) as e:
        raise LoaderError(
            f"fps={shown(fps)} is no rate; give frames a second above 0, like 8, 29.97 or '30000/1001'"
        ) from e


@dataclass(frozen=True)
class Sampling:
    """What a loader takes of each of n clips.

    Attributes:
        kept: int64 (m,), rows of clips that are in the order, ascending.
        num_frames: int64 (n,), frames of a sample.
        available: int64 (n,), how many of them the clip has; the rest repeat its last one.
        ratio: (numerators, denominators) int64 (n,) each: cache-grid steps a frame.
        num_short: clips with fewer frames than asked for (left out if short="skip").
        num_empty: clips without any cached frame; always left out.
    """

    kept: np.ndarray
    num_frames: np.ndarray
    available: np.ndarray
    ratio: tuple[np.ndarray, np.ndarray]
    num_short: int
    num_empty: int

    def grid_indices(self, row: int, first_grid: int) -> np.ndarray:
        """Grid indices of the frames that are there: int64 (min(available, num_frames),)."""
        k = np.arange(min(self.available[row], self.num_frames[row]), dtype=np.int64)
        return first_grid + k * self.ratio[0][row] // self.ratio[1][row]


def grid_ratio(cache_rate: Fraction, rate: Fraction, *, allow_uneven: bool) -> Fraction:
    """Cache-grid steps from one frame of ``rate`` to the next.

    Raises:
        LoaderError: the rate does not divide the cache's, and uneven steps are not allowed.
    """
    if divisor_step(cache_rate, rate) is None and not allow_uneven:
        fit = ", ".join(str(cache_rate / d) for d in range(1, 7))
        raise LoaderError(
            f"fps={rate} does not divide the cache's {cache_rate} frames/s, so some frames would be up to a step "
            "too early; "
            f"rates that fit: {fit}, …; or allow_uneven=True for the last cached frame at or before each time"
        )
    ratio = cache_rate / rate
    if max(ratio.numerator, ratio.denominator) >= MAX_RATE_PART:
        raise LoaderError(f"fps={rate} is too far from the cache's {cache_rate} frames/s to be worked out; round it")
    return ratio


def sample_clips(
    *,
    grid_count: np.ndarray,
    cache_fps: tuple[np.ndarray, np.ndarray],
    frames: FrameCount,
    fps: Fraction | None,
    short: str,
    allow_uneven: bool,
    clip_keys: object = None,
) -> Sampling:
    """Decide for all clips of a version at once.

    Args:
        grid_count: int64 (n,), grid times a clip owns.
        cache_fps: numerators and denominators, int64 (n,) each.
        frames: how many frames a sample has.
        fps: the loader's rate, None for the cache's own.
        short: ``"pad"`` | ``"skip"`` | ``"error"``: what to do with clips that have fewer frames.
        clip_keys: anything indexable by row, to name a clip in an error.

    Raises:
        LoaderError: an unknown ``short``, a rate that does not fit, or a short clip with ``short="error"``.
    """
    if short not in SHORT:
        raise LoaderError(f"short={short!r} cannot be used; allowed are 'pad', 'skip' and 'error'")
    num, den = _ratios(cache_fps, fps, allow_uneven)
    available = np.maximum(-((-grid_count * den) // num), 0)  # the count of k ≥ 0 with k·num/den < grid_count
    _check_count(frames, available)
    is_empty, is_short = grid_count < 1, available < frames.base
    if short == "error" and is_short.any():
        row = int(np.flatnonzero(is_short)[0])
        name = "" if clip_keys is None else f" (the first is {clip_keys[row]}, which has {available[row]})"  # type: ignore[index]
        raise LoaderError(
            f"{int(is_short.sum())} of {len(grid_count)} clips have fewer than {frames.base} frames{name}; "
            "use short='pad' to repeat their last frame or short='skip' to leave them out"
        )
    left_out = is_empty | is_short if short == "skip" else is_empty
    return Sampling(
        kept=np.flatnonzero(~left_out).astype(np.int64),
        num_frames=frames.take(available),
        available=available,
        ratio=(num, den),
        num_short=int((is_short & ~is_empty).sum()),
        num_empty=int(is_empty.sum()),
    )


def without_frames(num_clips: int) -> Sampling:
    """All clips, and no frame of any."""
    none, ones = np.zeros(num_clips, np.int64), np.ones(num_clips, np.int64)
    return Sampling(np.arange(num_clips), none, none, (ones, ones), num_short=0, num_empty=0)


def _check_count(frames: FrameCount, available: np.ndarray) -> None:
    """Raises LoaderError for a count that only repeated frames could fill, or that no memory holds."""
    longest = int(available.max(initial=0))
    most = int(frames.take(available).max(initial=0))
    if most > MAX_FRAMES or frames.base > max(longest, MAX_PADDED_FRAMES):
        raise LoaderError(
            f"frames={frames.option!r} asks for {most} frames of a clip, but the longest clip has {longest} at this "
            f"rate; allowed are up to {min(max(longest, MAX_PADDED_FRAMES), MAX_FRAMES)} (shorter clips are padded)"
        )


def _ratios(
    cache_fps: tuple[np.ndarray, np.ndarray], rate: Fraction | None, allow_uneven: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Grid steps a frame for every clip, worked out once for each rate that occurs in the version."""
    pairs, which = np.unique(np.stack(cache_fps, axis=1), axis=0, return_inverse=True)
    rates = [Fraction(int(n), int(d)) for n, d in pairs]
    if rate is None and len(set(rates)) > 1:
        names = ", ".join(str(r) for r in rates)
        raise LoaderError(
            f"the version's clips are cached at different rates ({names} frames/s); give fps=, a rate that divides "
            "all of them"
        )
    ratios = [Fraction(1) if rate is None else grid_ratio(r, rate, allow_uneven=allow_uneven) for r in rates]
    table = np.array([(r.numerator, r.denominator) for r in ratios], dtype=np.int64).reshape(-1, 2)
    picked = table[which.reshape(-1)]
    return picked[:, 0], picked[:, 1]
