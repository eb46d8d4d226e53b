"""Scaling on planes, against area scaling of the whole; JPEG from planes, against JPEG through RGB."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

from videoflow.media.picture import Pyramid, halve, resize
from workers.decode import cached_pictures
from workers.jpeg import encode_jpeg, encode_picture


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, ((a.astype(float) - b) ** 2).mean())))


@pytest.fixture
def landscape() -> np.ndarray:
    """Detail at all scales: uint8 (720, 1280)."""
    rng = np.random.default_rng(3)
    layers = [
        cv2.resize(rng.uniform(0, 255, (9 * 2**k, 16 * 2**k)), (1280, 720), interpolation=cv2.INTER_CUBIC) / 2**k
        for k in range(6)
    ]
    total = np.sum(layers, axis=0)
    return ((total - total.min()) / np.ptp(total) * 255).astype(np.uint8)


def test_halving_rounds_means_half_up_and_drops_odd_edges() -> None:
    plane = np.array([[0, 1, 9], [0, 1, 9], [9, 9, 9]], np.uint8)
    assert halve(plane).tolist() == [[1]]


@pytest.mark.parametrize(
    "size", [(1280, 720), (640, 360), (455, 256), (910, 512), (854, 480), (600, 300), (256, 144), (97, 55)]
)
def test_resize_is_near_area_scaling(landscape: np.ndarray, size: tuple[int, int]) -> None:
    area = cv2.resize(landscape, size, interpolation=cv2.INTER_AREA)
    assert resize(landscape, *size).shape == size[::-1]
    assert psnr(resize(landscape, *size), area) >= 44
    assert psnr(Pyramid(landscape).scaled(*size), area) >= 44


def test_a_pyramid_gives_the_same_whatever_was_asked_for_before(landscape: np.ndarray) -> None:
    sizes = [(455, 256), (160, 90), (48, 27)]
    used = Pyramid(landscape)
    for size in [*sizes, *reversed(sizes)]:
        assert np.array_equal(used.scaled(*size), Pyramid(landscape).scaled(*size))
        assert np.array_equal(used.sampled(*size), Pyramid(landscape).sampled(*size))


def test_small_pictures_are_near_the_mean_of_what_they_stand_for(landscape: np.ndarray) -> None:
    area = cv2.resize(landscape, (48, 27), interpolation=cv2.INTER_AREA)
    assert psnr(Pyramid(landscape).sampled(48, 27), area) >= 30


@pytest.mark.parametrize("size", [(227, 127), (228, 128), (120, 68)])
def test_chroma_of_odd_sizes_covers_half_a_pixel_more(size: tuple[int, int]) -> None:
    """A ramp keeps its slope: sample i of the result stands at (i + 0.5) / factor of the plane."""
    plane = np.tile(np.linspace(0, 250, 640, dtype=np.uint8), (360, 1))
    width = 2 * size[0] - 1
    scaled = Pyramid(plane).scaled_by(width / 1280, (2 * size[1] - 1) / 720)
    assert scaled is not None
    assert scaled.shape == size[::-1]
    wanted = np.clip(((np.arange(size[0]) + 0.5) * 1280 / width - 0.5) * 250 / 639, 0, 250)
    assert np.abs(scaled[0].astype(float) - wanted).max() <= 2


def test_what_linear_scaling_would_spoil_is_left_to_area_scaling(landscape: np.ndarray) -> None:
    assert Pyramid(landscape[:, :427]).scaled_by(0.25, 0.25) is None
    assert Pyramid(landscape).scaled_by(0.6, 0.6) is None


@pytest.mark.parametrize(
    ("name", "short_side"),
    [
        ("cuts_bikes.mp4", 133),
        ("cuts_bikes.mp4", 128),
        ("full_range_bt601.mp4", 181),
        ("full_range_bt601.mp4", 180),
        ("vp8_vorbis.webm", 256),
        ("vp8_vorbis.webm", 252),
    ],
)
def test_jpeg_of_planes_shows_what_jpeg_through_rgb_shows(corpus: Path, name: str, short_side: int) -> None:
    """Even and odd sizes, both ranges: as near to the picture as the way through RGB, at about the same size."""
    direct_psnr, through_psnr, direct_bytes, through_bytes = [], [], 0, 0
    for _, picture, size in cached_pictures(corpus / name, fps=2, short_side=short_side):
        assert picture.jpeg_planes(*size) is not None
        rgb = picture.rgb(*size)
        direct, through = encode_picture(picture, size, 90), encode_jpeg(rgb, 90)
        assert simplejpeg.decode_jpeg(direct).shape == rgb.shape
        direct_psnr.append(psnr(simplejpeg.decode_jpeg(direct), rgb))
        through_psnr.append(psnr(simplejpeg.decode_jpeg(through), rgb))
        direct_bytes, through_bytes = direct_bytes + len(direct), through_bytes + len(through)
    assert np.mean(direct_psnr) >= np.mean(through_psnr) - 0.5
    assert direct_bytes == pytest.approx(through_bytes, rel=0.05)


def test_the_bytes_do_not_depend_on_what_lay_in_memory(corpus: Path) -> None:
    """libjpeg-turbo reads luma up to even sides: at odd sizes what it reads there must be the picture's own."""
    digests = set()
    for level in (0, 255):
        junk = [np.full((127, 301 + i), level, np.uint8) for i in range(50)]
        _, picture, _ = next(cached_pictures(corpus / "cuts_bikes.mp4"))
        digests.add(encode_picture(picture, (299, 127), 90))
        del junk
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["rotate_180_phone_vfr.mp4", "two_video_streams_nasa.mp4", "hdr_pq_hevc_10bit.mp4"])
def test_turned_pictures_other_matrices_and_depths_go_through_rgb(corpus: Path, name: str) -> None:
    _, picture, size = next(cached_pictures(corpus / name, short_side=90))
    assert picture.jpeg_planes(*size) is None
    assert encode_picture(picture, size, 90) == encode_jpeg(picture.rgb(*size), 90)
