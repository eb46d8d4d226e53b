"""Clips as columns stand on the grid where clip by clip they would."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import run_job
from videoflow.dataset import placed
from videoflow.dataset.assemble import CachedVideo
from videoflow.dataset.placed import _first_of_each, _on_grid
from videoflow.loader.reader import BlobRef
from videoflow.recipe import Recipe
from videoflow.testing import make_barcode_video
from videoflow.timeline import Grid

TIME = st.integers(-(1 << 40), 1 << 40)
BASE = st.sampled_from([(1, 1000), (1, 90_000), (1001, 30_000), (1, 1), (1 << 30, 7)])
RATE = st.sampled_from(["8", "1", "30000/1001", "0.3", "1000000007"])


@settings(deadline=None)
@given(st.lists(st.tuples(TIME, st.integers(0, 1 << 20), TIME, BASE), min_size=1, max_size=20), RATE)
def test_columns_and_the_grid_agree(clips: list[tuple[int, int, int, tuple[int, int]]], rate: str) -> None:
    table = pa.table(
        {
            "t0_pts": [t for t, _, _, _ in clips],
            "t1_pts": [t + n for t, n, _, _ in clips],
            "start_pts": [s for _, _, s, _ in clips],
            "tb_num": [b[0] for _, _, _, b in clips],
            "tb_den": [b[1] for _, _, _, b in clips],
        }
    )
    expected = [bool(Grid(s, Fraction(*b), Fraction(rate)).indices(t, t + n)) for t, n, s, b in clips]
    assert _on_grid(table, Fraction(rate)).tolist() == expected


@given(st.lists(st.sampled_from("abcd"), max_size=12))
def test_an_interval_asked_for_twice_is_one_clip(keys: list[str]) -> None:
    expected = list({k: n for n, k in enumerate(keys)}.values())
    table = pa.table({"clip_key": pa.array(keys, pa.string()), "n": np.arange(len(keys))})
    assert _first_of_each(table)["n"].to_pylist() == expected


def test_a_clip_is_one_range_of_bytes_a_chunk() -> None:
    video = CachedVideo(8, 6, [0, 1, 2, 3, 4], [(0, 7, [0, 10, 30]), (1, 9, [0, 5, 6, 8])])
    assert video.refs(0, 0) == (BlobRef(0, 7, 0, 10),)
    assert video.refs(1, 3) == (BlobRef(0, 7, 10, 20), BlobRef(1, 9, 0, 6))
    assert video.refs(4, 4) == (BlobRef(1, 9, 6, 2),)


def test_batches_of_videos_make_the_version_that_one_batch_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(5):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=50 + i, offset=100 * i)
    recipe = Recipe(stages={"frames": {}, "clips": {"by": "windows", "window_seconds": 0.5}})
    one = run_job(recipe, [folder], tmp_path / "cat")
    monkeypatch.setattr(placed, "VIDEOS_AT_ONCE", 2)
    two = run_job(recipe, [folder], tmp_path / "cat")
    assert one.is_new_version and not two.is_new_version and one.clips == two.clips > 5
