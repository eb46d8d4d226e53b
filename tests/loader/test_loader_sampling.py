"""Counts and grid steps: exact, from the start of the clip, and refused where they would be wrong frames."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from videoflow.errors import LoaderError
from videoflow.loader.sampling import FrameCount, Sampling, grid_ratio, parse_fps, sample_clips


def sample(counts: list[int], frames: object, fps: object, cache: object = 8, **options: object) -> Sampling:
    rate = Fraction(str(cache))
    fill = [np.full(len(counts), v, dtype=np.int64) for v in (rate.numerator, rate.denominator)]
    merged = {"short": "pad", "allow_uneven": False, **options}
    return sample_clips(
        grid_count=np.array(counts, dtype=np.int64),
        cache_fps=(fill[0], fill[1]),
        frames=FrameCount.parse(frames),
        fps=parse_fps(fps),
        **merged,  # type: ignore[arg-type]
    )


def test_divisor_rates_step_over_the_grid() -> None:
    assert sample([16], 4, 8).grid_indices(0, 5).tolist() == [5, 6, 7, 8]
    assert sample([16], 4, 2).grid_indices(0, 5).tolist() == [5, 9, 13, 17]
    assert sample([16], 4, None).grid_indices(0, 5).tolist() == [5, 6, 7, 8]
    assert sample([30], 4, "30000/2002", "30000/1001").grid_indices(0, 0).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(("count", "available"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (0, 0)])
def test_available_frames_lie_inside_the_clip(count: int, available: int) -> None:
    assert sample([count], 4, 2).available.tolist() == [available]


def test_a_rate_that_does_not_divide_is_refused_unless_allowed() -> None:
    with pytest.raises(LoaderError, match=r"fps=6 does not divide the cache's 8.*8, 4, 8/3, 2.*allow_uneven=True"):
        sample([16], 8, 6)
    uneven = sample([16], 8, 6, allow_uneven=True)
    assert uneven.grid_indices(0, 10).tolist() == [10, 11, 12, 14, 15, 16, 18, 19]  # the floor of 10 + k·4/3
    assert uneven.available.tolist() == [12]
    assert sample([3], 8, 16, allow_uneven=True).grid_indices(0, 0).tolist() == [0, 0, 1, 1, 2, 2]


def test_largest_count_that_fits() -> None:
    taken = sample([1, 8, 9, 16, 17, 20], "1+8k", 8)
    assert taken.num_frames.tolist() == [1, 1, 9, 9, 17, 17]
    assert taken.kept.tolist() == [0, 1, 2, 3, 4, 5]
    assert taken.num_short == 0
    assert sample([3, 9], "5+4k", 8, short="skip").kept.tolist() == [1]


def test_short_clips() -> None:
    padded = sample([4, 3, 0], 4, 8)
    assert (padded.kept.tolist(), padded.num_short, padded.num_empty) == ([0, 1], 1, 1)
    assert padded.grid_indices(1, 7).tolist() == [7, 8, 9]
    skipped = sample([4, 3, 0, 5], 4, 8, short="skip")
    assert (skipped.kept.tolist(), skipped.num_short) == ([0, 3], 1)
    with pytest.raises(LoaderError, match=r"2 of 3 clips have fewer than 4 frames \(the first is b, which has 3\)"):
        sample([4, 3, 0], 4, 8, short="error", clip_keys=["a", "b", "c"])
    with pytest.raises(LoaderError, match=r"short='drop'"):
        sample([4], 4, 8, short="drop")


def test_caches_of_different_rates() -> None:
    both = (np.array([8, 4]), np.array([1, 1]))
    options = {"grid_count": np.array([16, 8]), "cache_fps": both, "frames": FrameCount(4), "short": "pad"}
    taken = sample_clips(fps=Fraction(2), allow_uneven=False, **options)  # type: ignore[arg-type]
    assert [taken.grid_indices(i, 0).tolist() for i in (0, 1)] == [[0, 4, 8, 12], [0, 2, 4, 6]]
    with pytest.raises(LoaderError, match=r"different rates"):
        sample_clips(fps=None, allow_uneven=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", [0, -1, 2.5, True, "eight", "0+8k", "1+0k", None])
def test_counts_that_are_refused(frames: object) -> None:
    with pytest.raises(LoaderError, match=r"frames="):
        FrameCount.parse(frames)


def test_whole_clips_are_not_there_yet() -> None:
    with pytest.raises(LoaderError, match=r"not there yet"):
        FrameCount.parse("whole")


def test_options_come_back_as_they_are_written() -> None:
    assert FrameCount.parse("1 + 8k").option == "1+8k"
    assert FrameCount.parse(np.int64(5)).option == 5


def test_rates_that_are_none() -> None:
    with pytest.raises(LoaderError, match=r"fps="):
        parse_fps("fast")
    assert grid_ratio(Fraction(8), Fraction(4), allow_uneven=False) == 2
