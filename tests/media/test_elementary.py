"""Elementary streams: no container, no timestamps; the times are those of the FFmpeg command line."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from videoflow import Video
from videoflow.testing import decode_pass, make_barcode_video, read_barcode

CODECS = {"h264": ("-c:v", "libx264"), "hevc": ("-c:v", "libx265", "-x265-params", "log-level=error")}


def ffmpeg_times(path: Path) -> list[Fraction]:
    """Seconds of every frame, as ``ffmpeg`` itself spaces them."""
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-fps_mode", "passthrough", "-f", "framecrc", "-"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (base,) = (Fraction(line.split()[-1]) for line in lines if line.startswith("#tb 0"))
    return [int(line.split(",")[2]) * base for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("rate", ["30", "24000/1001", "25"])
@pytest.mark.parametrize("kind", CODECS)
def test_times_and_pictures_are_ffmpegs(tmp_path: Path, kind: str, rate: str) -> None:
    path = make_barcode_video(tmp_path / f"a.{kind}", num_frames=60, rate=rate, codec=CODECS[kind])
    video = Video(path)
    times = [float(p * video.time_base) for p in video.pts]
    assert times == pytest.approx([float(t) for t in ffmpeg_times(path)], abs=1e-6)
    assert [read_barcode(f.image) for f in video.frames(index=range(60))] == list(range(60))
    assert not video.is_vfr and video.fps == pytest.approx(float(Fraction(rate)), rel=1e-4)
    assert video.damage_seconds == []
    step = Fraction(1) / Fraction(rate)
    for pts, picture in decode_pass(path):
        assert read_barcode(picture) == round(pts * video.time_base / step)


def test_a_stream_without_a_rate_is_shown_at_25(tmp_path: Path) -> None:
    path = make_barcode_video(
        tmp_path / "a.h264", num_frames=30, codec=("-c:v", "libx264", "-x264-params", "force-cfr=1", "-bsf:v",
        "filter_units=remove_types=6,h264_metadata=tick_rate=0"),
    )  # fmt: skip
    video = Video(path)
    assert video.fps == pytest.approx(float(1 / (ffmpeg_times(path)[1] - ffmpeg_times(path)[0])))


def test_damage_is_named_up_to_the_next_keyframe(tmp_path: Path) -> None:
    """A slice header is overwritten; FFmpeg has to give up on it, and the frames that lean on it are not clean."""
    path = make_barcode_video(
        tmp_path / "a.h264", num_frames=90, codec=("-c:v", "libx264", "-g", "30", "-bf", "0", "-sc_threshold", "0", "-x264-params", "slices=1"),
    )  # fmt: skip
    data = bytearray(path.read_bytes())
    starts = [i for i in range(len(data) - 4) if data[i : i + 3] == b"\x00\x00\x01" and data[i + 3] & 0x1F in (1, 5)]
    assert len(starts) == 90
    for at in starts[40:43]:
        data[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(data))
    video = Video(path)
    clean = [f for f in video.frames(index=range(len(video))) if video.is_clean(f.index)]
    shown = [read_barcode(f.image) for f in clean]
    assert set(range(40)) <= set(shown) and set(range(60, 90)) <= set(shown)
    assert not set(shown) & set(range(43, 60))
    assert np.all(np.diff(shown) > 0)
