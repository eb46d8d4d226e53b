"""Pictures of a GPU become those of the CPU: all samples, all tags, all bytes made of them; and what may go there."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from tests import fake_gpu
from videoflow.errors import MediaError, SystemFailure
from videoflow.media import nvdec
from videoflow.media.decoder import open_decoder
from videoflow.media.nvdec import LeftToCpu, suits_gpu
from videoflow.media.picture import FAST_FORMATS, Picture, geometry_of, plane_array
from workers.canary import canary_paths
from workers.jpeg import encode_picture
from workers.nvdec import CLIPS

OURS = [p for p in canary_paths() if p.stem.split("_")[0] in nvdec.CODECS] + sorted(CLIPS.iterdir())
#: Odd sides, mirrored and turned, full range, variable rate, a clock that wraps, hidden frames, an open GOP.
HARD = [
    "vp9_odd_161x121.webm",
    "rotate_and_mirror.mp4",
    "rotate_90.mov",
    "full_range_bt601.mp4",
    "negative_start_clock_wraps.ts",
    "editlist_discards_first_keyframe.mp4",
    "open_gop_hevc.ts",
]


def pairs(path: Path) -> Iterator[tuple[Any, av.VideoFrame, av.VideoFrame]]:
    """(stream, frame of the CPU, frame of the stand-in), in order; both end at the same frame."""
    pix_fmt = suits_gpu(path)
    with open_decoder(path) as cpu, fake_gpu.opener()(path, pix_fmt=pix_fmt) as gpu:
        for a, b in zip(cpu.frames(), gpu.frames(), strict=True):
            yield cpu.stream, a, b
        assert gpu.tally == cpu.tally


def tags(frame: av.VideoFrame) -> dict[str, Any]:
    names = "pts duration time_base key_frame interlaced_frame width height colorspace color_range color_trc color_primaries"
    side = [(d.type.name, bytes(d)) for d in frame.side_data]
    return {name: getattr(frame, name) for name in names.split()} | {"format": frame.format.name, "side_data": side}


def same(stream: Any, a: av.VideoFrame, b: av.VideoFrame) -> None:
    assert tags(a) == tags(b)
    for p, q in zip(a.planes, b.planes, strict=True):
        assert np.array_equal(plane_array(p, p.width, p.height), plane_array(q, q.width, q.height))
    left, right = (Picture(f, geometry_of(f, stream)) for f in (a, b))
    size = left.geometry.fit_short_side(36)
    assert right.geometry == left.geometry and right.is_fast
    assert np.array_equal(left.rgb(*size), right.rgb(*size))
    assert np.array_equal(left.rgb(*left.stored_size), right.rgb(*right.stored_size))
    assert encode_picture(left, size, 90) == encode_picture(right, size, 90)
    assert np.array_equal(left.small_rgb(48, 27), right.small_rgb(48, 27))
    assert np.array_equal(left.luma(12, 9), right.luma(12, 9))


@pytest.mark.parametrize("path", [p for p in OURS if "8bit" in p.stem or p.parent == CLIPS], ids=lambda p: p.stem)
def test_our_clips_come_out_as_from_the_cpu(path: Path) -> None:
    if "422" in path.stem or "444" in path.stem:
        with pytest.raises(LeftToCpu, match="pixel format yuv4"):
            suits_gpu(path)
        return
    counted = [same(*pair) for pair in pairs(path)]
    assert len(counted) == (8 if path.parent == CLIPS else 6)


@pytest.mark.parametrize("name", HARD)
def test_hard_files_come_out_as_from_the_cpu(corpus: Path, name: str) -> None:
    for n, pair in enumerate(pairs(corpus / name)):
        if n < 12:
            same(*pair)
        else:
            assert tags(pair[1]) == tags(pair[2])


@pytest.mark.parametrize(("width", "height"), [(64, 48), (161, 121), (35, 27), (2, 2)])
@pytest.mark.parametrize(
    ("name", "color_range"), [("yuv420p", 0), ("yuv420p", 1), ("yuv420p", 2), ("yuvj420p", 0), ("yuvj420p", 2)]
)
def test_taking_u_and_v_apart_changes_no_value(width: int, height: int, name: str, color_range: int) -> None:
    """All values, in NV12 that is put together by hand: no range is clipped, none is stretched, however it is tagged
    (0: not at all, 1: limited, 2: full).
    """
    rng = np.random.default_rng(width)
    y = rng.integers(0, 256, (height, width), np.uint8)
    uv = rng.integers(0, 256, ((height + 1) // 2, (width + 1) // 2, 2), np.uint8)
    frame = av.VideoFrame(width, height, "nv12")
    for plane, values in zip(frame.planes, (y, uv.reshape(len(uv), -1)), strict=True):
        rows = np.zeros((plane.buffer_size // plane.line_size, plane.line_size), np.uint8)
        rows[: len(values), : values.shape[1]] = values
        plane.update(rows.tobytes())
    frame.pts, frame.color_range = 7, color_range
    with open_decoder(CLIPS / "h264_limited.mp4") as any_file:
        decoder = nvdec.NvdecDecoder(any_file.container, any_file.stream, name)
        decoder._size = (width, height)
        planar = decoder._planar(frame)
    assert (planar.format.name, planar.pts, int(planar.color_range)) == (name, 7, color_range)
    for plane, values in zip(planar.planes, (y, uv[..., 0], uv[..., 1]), strict=True):
        assert np.array_equal(plane_array(plane, values.shape[1], values.shape[0]), values)


@pytest.mark.parametrize("path", canary_paths(), ids=lambda p: p.stem)
def test_only_8_bit_420_of_three_codecs_goes_to_the_gpu(path: Path) -> None:
    codec = path.stem.split("_")[0]
    goes = (
        codec in ("h264", "hevc", "vp9") and "8bit" in path.stem and "422" not in path.stem and "444" not in path.stem
    )
    if goes:
        assert suits_gpu(path) in FAST_FORMATS
    else:
        with pytest.raises(LeftToCpu, match=f"pixel format yuv|codec {codec}"):
            suits_gpu(path)


def test_what_is_no_video_is_told_as_ever(corpus: Path) -> None:
    for name, code in (("zero_byte.mp4", "empty"), ("audio_only.mp4", "no_video_stream")):
        with pytest.raises(MediaError) as e:
            suits_gpu(corpus / name)
        assert e.value.code == code


def drain(path: Path, fault: fake_gpu.Fault | None = None) -> int:
    with fake_gpu.opener(fault)(path, pix_fmt=suits_gpu(path)) as gpu:
        return sum(1 for _ in gpu.frames())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("corrupt_midstream.mp4", "a packet that the GPU does not decode"),
        ("truncated_faststart.mp4", "a packet that the GPU does not decode"),
        ("resolution_change.ts", "pictures of another size"),
    ],
)
def test_damage_and_changes_are_left_to_the_cpu(corpus: Path, name: str, says: str) -> None:
    with pytest.raises(LeftToCpu, match=says):
        drain(corpus / name)


def test_a_file_cut_between_two_packets_is_left_to_the_cpu(tmp_path: Path) -> None:
    """No packet fails, only the index knows that some are missing: told at the end, when all frames were shown."""
    path = tmp_path / "cut.mp4"
    command = ["ffmpeg", "-v", "error", "-i", str(CLIPS / "h264_limited.mp4"), "-c", "copy", "-movflags", "+faststart"]
    subprocess.run([*command, str(path)], check=True)
    with open_decoder(path) as decoder:
        ends = sorted(e.pos + e.size for e in decoder.stream.index_entries)
    path.write_bytes(path.read_bytes()[: ends[5]])
    with pytest.raises(LeftToCpu, match="damaged"):
        drain(path)


def test_faults_of_the_gpu_are_left_to_the_cpu() -> None:
    path = CLIPS / "h264_limited.mp4"
    assert drain(path) == 8

    def no_room(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        raise av.error.MemoryError(12, "Cannot allocate memory")

    def uncut(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        return [fake_gpu.nv12(f, width=f.width + 14) for f in frames]  # what is cut off at the left is still there

    def deeper(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        return [f.reformat(format="p010le") for f in frames]

    for fault, says in (
        (no_room, "a packet"),
        (uncut, "another size"),
        (deeper, "come as p010le"),
        (fake_gpu.failing_at(5), "a packet"),
    ):
        with pytest.raises(LeftToCpu, match=says):
            drain(path, fault)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemFailure) as e:
        nvdec.gpu()
    assert str(e.value) == (
        "decoder: nvdec needs an NVIDIA GPU and its driver, and this machine gives none (Cannot load libcuda.so.1); "
        "run the same command again where there is one, or with --set decoder=cpu"
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_gpu_that_goes_away_blames_no_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there for the first video of a process; FFmpeg then cannot open the next one with it."""
    real = nvdec.gpu

    @functools.cache
    def gpu() -> Any:
        return real() if asked else asked.append(1) or SimpleNamespace(options={})

    asked: list[int] = []
    monkeypatch.setattr(nvdec, "gpu", gpu)
    path = CLIPS / "h264_limited.mp4"
    with pytest.raises(SystemFailure, match="this machine gives none"), nvdec.open_on_gpu(path, pix_fmt="yuv420p"):
        pass
    assert asked


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_gpu_without_room_leaves_the_video_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = functools.cache(lambda: SimpleNamespace(options={}))
    monkeypatch.setattr(nvdec, "gpu", gpu)
    path = CLIPS / "h264_limited.mp4"
    with pytest.raises(LeftToCpu, match="no place on the GPU"), nvdec.open_on_gpu(path, pix_fmt="yuv420p"):
        pass
