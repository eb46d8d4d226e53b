"""Geometry of fit modes, and one filter in two forms."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from videoflow.errors import LoaderError
from videoflow.loader.engine_dali import fit_on_device
from videoflow.loader.fit import Box, check_fit, fit_into, parse_size, place, resize


def natural(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with detail at several scales, uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    layers = [
        rng.integers(0, 255, (max(1, height // s), max(1, width // s), 3)).astype(np.float32) for s in (4, 16, 64)
    ]
    return (
        np.mean([cv2.resize(x, (width, height), interpolation=cv2.INTER_CUBIC) for x in layers], axis=0)
        .clip(0, 255)
        .astype(np.uint8)
    )


def test_as_cached() -> None:
    placement = place(256, 456, None, "crop")
    assert placement.is_copy
    assert placement.fills
    assert placement.size == (256, 456)


def test_crop_takes_the_largest_centred_part() -> None:
    assert place(256, 456, (224, 224), "crop").source == Box(0, 100, 256, 256)
    assert place(456, 256, (224, 224), "crop").source == Box(100, 0, 256, 256)
    assert place(256, 456, (128, 456), "crop").source == Box(64, 0, 128, 456)
    assert place(256, 456, (256, 256), "crop").is_copy


def test_pad_shows_everything_centred_on_black() -> None:
    placement = place(64, 128, (128, 128), "pad")
    assert placement.target == Box(32, 0, 64, 128)
    out = np.full((128, 128, 3), 99, np.uint8)
    fit_into(np.full((64, 128, 3), 200, np.uint8), placement, out)
    assert (out[32:96] == 200).all()
    assert (out[:32] == 0).all()
    assert (out[96:] == 0).all()


def test_stretch_fills() -> None:
    placement = place(64, 128, (32, 32), "stretch")
    assert placement.source == Box(0, 0, 64, 128)
    assert placement.fills
    assert not placement.enlarges
    assert place(64, 128, (65, 32), "stretch").enlarges


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 500), (500, 1), (17, 333), (255, 257)])
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_extreme_shapes_stay_inside(height: int, width: int, fit: str) -> None:
    placement = place(height, width, (30, 40), fit)
    source, target = placement.source, placement.target
    assert min(source.height, source.width, target.height, target.width) >= 1
    assert source.top + source.height <= height
    assert source.left + source.width <= width
    assert target.top + target.height <= 30
    assert target.left + target.width <= 40


@pytest.mark.parametrize("size", [(224, 224), (112, 112), (100, 60), (300, 500), (64, 64), (256, 100)])
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_matrices_are_the_same_filter(size: tuple[int, int], fit: str) -> None:
    torch = pytest.importorskip("torch")
    pictures = np.stack([natural(256, 341, seed) for seed in range(2)])
    placement = place(256, 341, size, fit)
    expected = np.empty((2, *size, 3), np.uint8)
    for picture, out in zip(pictures, expected, strict=True):
        fit_into(picture, placement, out)
    difference = np.abs(fit_on_device(torch.from_numpy(pictures), placement).numpy().astype(int) - expected)
    assert difference.mean() <= 0.5
    assert difference.max() <= 12


def test_shrinking_keeps_the_mean() -> None:
    picture = natural(256, 256)
    assert abs(resize(picture, 64, 64).mean() - picture.mean()) < 1


@pytest.mark.parametrize("size", [0, -3, (3,), (3, 4, 5), "224", (2.5, 3), True])
def test_sizes_that_are_refused(size: object) -> None:
    with pytest.raises(LoaderError, match=r"size="):
        parse_size(size)


def test_sizes_and_fits() -> None:
    assert parse_size(224) == (224, 224)
    assert parse_size([64, 128]) == (64, 128)
    assert parse_size(None) is None
    with pytest.raises(LoaderError, match=r"fit='cover'"):
        check_fit("cover")
