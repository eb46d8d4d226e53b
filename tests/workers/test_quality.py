"""Quality: values worked out by hand on tiny pictures, the grid of GRID.tsv, digests that see one grey level."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import read_tsv
from videoflow.stage import Product, ShownFrame, VideoHeader, VideoSummary
from workers.decode import run_pass
from workers.quality import Quality, QualityParams, measure, small_size, values_of


class FakePicture:
    """A picture that is its own small luma."""

    def __init__(self, luma: np.ndarray) -> None:
        self._luma = luma

    @property
    def stored_size(self) -> tuple[int, int]:
        return self._luma.shape[1], self._luma.shape[0]

    def luma(self, width: int, height: int) -> np.ndarray:
        assert (width, height) == self.stored_size
        return self._luma


def run(lumas: list[np.ndarray], **params: Any) -> Product:
    """Quality over pictures 1/8 s apart."""
    stage = Quality(QualityParams(**params))
    stage.begin(VideoHeader("0" * 32, 0, Fraction(1, 8), 100))
    for i, luma in enumerate(lumas):
        picture: Any = FakePicture(luma)
        stage.see(ShownFrame(i, 100 + i, 101 + i, picture))
        luma[:] = 77  # the decoder takes its memory back
    return stage.finish(VideoSummary(len(lumas), 100 + len(lumas), ()))


def grey(level: int) -> np.ndarray:
    return np.full((12, 16), level, np.uint8)


def test_motion_luma_and_black_of_flat_pictures() -> None:
    (row,) = run([grey(0), grey(51), grey(0), grey(255)]).rows
    assert row["pts"] == [100, 101, 102, 103]
    assert row["motion"] == [0.0, 0.2, 0.2, 1.0]
    assert row["luma"] == [0.0, 0.2, 0.0, 1.0]
    assert row["black"] == [1.0, 0.0, 1.0, 0.0]
    assert row["sharpness"] == [0.0] * 4


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    """One bright point: −4·100 at it, 100 at its four neighbours, else 0: mean 0, mean square (16 + 4)·10⁴ / 192."""
    luma = np.zeros((12, 16), np.uint8)
    luma[5, 5] = 100
    values = values_of(measure(luma, None), luma.size)
    assert values["sharpness"] == pytest.approx(20e4 / 192)


def test_only_grid_frames_are_measured_and_motion_is_between_them() -> None:
    (row,) = run([grey(0), grey(255), grey(51), grey(255)], fps=4).rows
    assert row["pts"] == [100, 102]
    assert row["motion"] == [0.0, 0.2]


def test_half_black() -> None:
    luma = grey(200)
    luma[:, :8] = 25
    assert run([luma]).rows[0]["black"] == [0.5]


@pytest.mark.parametrize(
    ("stored", "small"),
    [((1280, 720), (160, 90)), ((720, 1280), (90, 160)), ((100, 60), (100, 60)), ((4000, 2), (160, 1))],
)
def test_small_size(stored: tuple[int, int], small: tuple[int, int]) -> None:
    assert small_size(stored) == small


def test_the_digest_sees_one_grey_level_in_one_pixel() -> None:
    first, second = grey(90), grey(90)
    second[3, 3] = 91
    assert run([first]).digest != run([second]).digest
    assert run([grey(90)]).digest == run([grey(90)]).digest


@pytest.mark.parametrize(
    "name", ["cuts_vfr_bikes.mp4", "vp9_odd_161x121.webm", "prores_422_10bit.mov", "gif_30_frames.gif"]
)
def test_pts_are_those_of_the_grid(corpus: Path, name: str) -> None:
    rows: list[dict[str, Any]] = []
    run_pass(corpus / name, video_key="0" * 32, consumers=[Quality()], sink=lambda _, row: rows.append(row))
    (wanted,) = (r["cached_pts"] for r in read_tsv("GRID.tsv") if r["file"] == name)
    (row,) = rows
    assert row["pts"] == [int(p) for p in wanted.split(",")]
    for column in ("motion", "luma", "black"):
        assert len(row[column]) == len(row["pts"])
        assert all(0.0 <= v <= 1.0 for v in row[column])
    assert all(v >= 0.0 for v in row["sharpness"])


def test_rates_that_mean_the_same_are_the_same_parameters() -> None:
    assert QualityParams(fps=8) == QualityParams(fps="8") == QualityParams(fps=8.0)
    with pytest.raises(ValueError, match="above 0"):
        QualityParams(fps=0)
