"""Canaries: what the clips are, that every one decodes, and that the identity follows pixels and JPEG bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest

from videoflow.media.picture import Picture
from workers import canary
from workers.canary import canary_paths, decoder_identity
from workers.decode import decode_pictures

#: By name: codec, pixel format, range (1 limited, 2 full) as FFmpeg names and numbers them.
CLIPS = {
    "h264_8bit_limited": ("h264", "yuv420p", 1),
    "h264_8bit_full": ("h264", "yuvj420p", 2),
    "h264_10bit_limited": ("h264", "yuv420p10le", 1),
    "hevc_8bit_limited": ("hevc", "yuv420p", 1),
    "hevc_8bit_full": ("hevc", "yuvj420p", 2),
    "hevc_10bit_limited": ("hevc", "yuv420p10le", 1),
    "h264_8bit_422": ("h264", "yuv422p", 1),
    "h264_8bit_444": ("h264", "yuv444p", 1),
    "vp9_8bit_limited": ("vp9", "yuv420p", 1),
    "vp9_10bit_limited": ("vp9", "yuv420p10le", 1),
    "av1_8bit_limited": ("av1", "yuv420p", 1),
    "av1_10bit_limited": ("av1", "yuv420p10le", 1),
    "vp8_8bit_limited": ("vp8", "yuv420p", 1),
    "mpeg2_8bit_limited": ("mpeg2video", "yuv420p", 1),
    "mpeg4_8bit_limited": ("mpeg4", "yuv420p", 0),
    "mjpeg_8bit_422_full": ("mjpeg", "yuvj422p", 2),
    "prores_10bit_422": ("prores", "yuv422p10le", 1),
}


@pytest.fixture
def fresh() -> Iterator[None]:
    decoder_identity.cache_clear()
    yield
    decoder_identity.cache_clear()


def test_the_clips_are_what_their_names_say() -> None:
    assert {p.stem for p in canary_paths()} == set(CLIPS)
    for path in canary_paths():
        with av.open(str(path)) as container:
            frame = next(container.decode(video=0))
            codec = container.streams.video[0].codec_context.codec.canonical_name
            assert (codec, frame.format.name, int(frame.color_range)) == CLIPS[path.stem]
        assert path.stat().st_size < 12_000


def test_every_clip_gives_six_pictures_near_the_test_pattern() -> None:
    """testsrc2 has the same picture in all clips: codecs, depths and ranges agree within coding loss."""
    seen = {p.stem: [rgb.astype(int) for _, rgb in decode_pictures(p)] for p in canary_paths()}
    reference = seen["h264_8bit_limited"]
    for name, pictures in seen.items():
        assert len(pictures) == 6, name
        for a, b in zip(pictures, reference, strict=True):
            assert a.shape == (48, 64, 3)
            assert np.abs(a - b).mean() < 12, name


def test_the_identity_is_the_same_in_another_process() -> None:
    code = "from workers.canary import decoder_identity; print(decoder_identity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == decoder_identity()
    assert len(decoder_identity()) == 32


@pytest.mark.usefixtures("fresh")
def test_one_pixel_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = decoder_identity()
    decoder_identity.cache_clear()

    rgb = Picture.rgb

    def other(self: Picture, width: int, height: int) -> np.ndarray:
        changed = rgb(self, width, height).copy()
        changed[0, 0, 0] ^= 1
        return changed

    monkeypatch.setattr(Picture, "rgb", other)
    assert decoder_identity() != before


@pytest.mark.usefixtures("fresh")
def test_another_jpeg_encoder_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = decoder_identity()
    decoder_identity.cache_clear()
    encode = canary.encode_picture
    monkeypatch.setattr(canary, "encode_picture", lambda *picture: encode(*picture) + b"\0")
    assert decoder_identity() != before


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", ["small_rgb", "luma"])
def test_small_pictures_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    before = decoder_identity()
    decoder_identity.cache_clear()
    made = getattr(Picture, kind)
    monkeypatch.setattr(Picture, kind, lambda self, width, height: made(self, width, height) ^ 1)
    assert decoder_identity() != before


@pytest.mark.usefixtures("fresh")
def test_a_clip_that_cannot_be_decoded_counts_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    before = decoder_identity()
    decoder_identity.cache_clear()
    for path in canary_paths():
        (tmp_path / path.name).write_bytes(b"no video" if path.stem.startswith("hevc") else path.read_bytes())
    monkeypatch.setattr(canary, "FOLDER", tmp_path)
    assert decoder_identity() != before
