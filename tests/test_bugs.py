"""Reports from neighbouring projects that must not happen here (H01–H06, H08–H10, H12's CPU half)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

import videoflow
from tests.conftest import read_tsv
from videoflow import Video
from videoflow.errors import FrameIndexError
from videoflow.recipe import Recipe
from videoflow.testing import decode_pass, read_barcode

BAD = {
    "zero_byte.mp4": "empty",
    "text_named_mp4.mp4": "not_video",
    "audio_only.mp4": "no_video_stream",
    "corrupt_header_no_moov.mp4": "header_damaged",
    "truncated_moov_lost.mp4": "header_damaged",
}


def barcodes(video: Video, **which: object) -> list[int]:
    return [read_barcode(f.image) for f in video.frames(**which)]  # type: ignore[arg-type]


# -- H01 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("bug_inputs/audio_outlasts_video_100f.mp4", 100), ("truncated_faststart.mp4", 126)]
)
def test_h01_count_is_what_decodes_and_the_tail_ends_at_once(corpus: Path, name: str, count: int) -> None:
    video = Video(corpus / name, timeout_seconds=60)
    assert len(video) == count
    (last,) = video.frames(index=count - 1)
    assert last.index == count - 1 and video.frames(index=-1)[0].pts == last.pts
    if name.startswith("bug_inputs/"):
        assert read_barcode(last.image) == count - 1
    with pytest.raises(IndexError):
        video.frames(index=count)
    with pytest.raises(FrameIndexError):
        video.frames(at=video.start_seconds + video.duration_seconds + 1)
    spread = np.linspace(0, len(video) - 1, 16).round().astype(int).tolist()
    found = video.frames(index=spread)
    assert [f.index for f in found] == spread
    if name.startswith("bug_inputs/"):
        assert [read_barcode(f.image) for f in found] == spread


def test_h01_a_callers_time_limit_works(corpus: Path) -> None:
    with pytest.raises(TimeoutError):
        len(Video(corpus / "bug_inputs/audio_outlasts_video_100f.mp4", timeout_seconds=0))


# -- H02 -------------------------------------------------------------------------------------------------------------


def test_h02_damage_in_the_middle_is_named_and_the_rest_is_exact(corpus: Path) -> None:
    video = Video(corpus / "bug_inputs/hole_in_gop_4_of_10.mp4")
    assert len(video) == 294
    frames = video.frames(index=range(294))
    clean = [f for f in frames if video.is_clean(f.index)]
    assert [round(f.pts_seconds * 30) for f in clean] == [*range(125), *range(150, 300)]
    assert [read_barcode(f.image) for f in clean] == [*range(125), *range(150, 300)]
    assert video.damage_seconds == [(pytest.approx(125 / 30), pytest.approx(5.0))]


def test_h02_one_lost_frame_is_not_passed_as_whole(corpus: Path) -> None:
    video = Video(corpus / "corrupt_midstream.mp4")
    assert len(video) == 49
    (start, end) = video.damage_seconds[0]
    assert start == pytest.approx(2.9) and end >= 5.0


# -- H03 -------------------------------------------------------------------------------------------------------------


def test_h03_edit_list_hides_a_keyframe(corpus: Path) -> None:
    path = corpus / "editlist_discards_first_keyframe.mp4"
    video = Video(path)
    assert len(video) == 25
    straight = video.frames(index=range(25))
    assert [f.pts_seconds for f in straight] == pytest.approx([i * 0.04 for i in range(25)])
    command = [
        "ffmpeg",
        "-v",
        "error",
        "-i",
        str(path),
        "-fps_mode",
        "passthrough",
        "-pix_fmt",
        "rgb24",
        "-f",
        "rawvideo",
        "-",
    ]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    golden = np.frombuffer(raw, np.uint8).reshape(-1, 64, 64, 3)
    assert len(golden) == 25
    for i in (0, 24, 7, 13):
        (alone,) = video.frames(index=i)
        assert (alone.image == straight[i].image).all()
    for f in straight:
        assert np.abs(f.image.astype(int) - golden[f.index]).max() <= 2


# -- H04 -------------------------------------------------------------------------------------------------------------


def test_h04_a_late_start_is_part_of_time(corpus: Path) -> None:
    video = Video(corpus / "start_at_10s_sar.mp4")
    assert [f.pts_seconds for f in video.frames(index=[0, 15, 119])] == pytest.approx([10, 10.5, 10 + 119 / 30])
    assert video.frames(at=10.5)[0].index == 15
    assert video.frames(at=0.5, since_start=True)[0].index == 15
    assert video.duration_seconds == pytest.approx(4.0)
    with pytest.raises(FrameIndexError):
        video.frames(at=[5.0])
    ts = Video(corpus / "open_gop_hevc.ts")
    assert ts.start_seconds == pytest.approx(1.48)
    assert ts.frames(at=1.48 + 1.0)[0].index == 25


# -- H05 -------------------------------------------------------------------------------------------------------------


def test_h05_cut_times_on_vfr_come_from_pts(catalog_of_hard_files: videoflow.Catalog) -> None:
    table = catalog_of_hard_files.version("hard").clips(filter="uri LIKE '%cuts_vfr_bikes.mp4'")
    rows = sorted(table.to_pylist(), key=lambda r: r["t0_us"])
    assert [r["t0_us"] for r in rows[1:]] == [1_200_000, 3_120_000, 5_480_000, 8_280_000]
    assert [r["num_frames"] for r in rows] == [30, 36, 31, 50, 55]
    assert rows[-1]["t1_us"] == 10_480_000
    # The last shot, [10.48, 10.8) s with 8 frames, is shorter than min_seconds.
    clips = catalog_of_hard_files.version("hard_short").clips(filter="uri LIKE '%cuts_vfr_bikes.mp4'").to_pylist()
    last = max(clips, key=lambda r: r["t0_us"])
    assert (last["t0_us"], last["t1_us"], last["num_frames"]) == (10_480_000, 10_800_000, 8)


# -- H06 -------------------------------------------------------------------------------------------------------------


def test_h06_every_frame_of_every_episode_by_local_time(corpus: Path) -> None:
    video = Video(corpus / "bug_inputs/episodes_40x37_at_2997.mp4")
    step = Fraction(1001, 30000)
    exact = [float((37 * e + k) * step) for e in range(40) for k in range(37)]
    assert barcodes(video, at=exact) == list(range(1480))
    rounded = [round(float(37 * e * step), 3) + float(k * step) for e in range(40) for k in range(37)]
    assert barcodes(video, at=rounded) == list(range(1480))


# -- H07 is part of the probe's own facts ----------------------------------------------------------------------------


def test_h07_constant_and_variable_rate(corpus: Path) -> None:
    constant = Video(corpus / "bug_inputs/cfr_40fps_from_raw.mp4")
    assert not constant.is_vfr and constant.fps == 40 and len(constant) == 120
    assert barcodes(constant, index=range(120)) == list(range(120))
    assert Video(corpus / "cuts_vfr_bikes.mp4").is_vfr


# -- H08 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rotate_90.mov", "rotate_180_phone_vfr.mp4", "rotate_and_mirror.mp4"])
def test_h08_pictures_are_upright_everywhere(corpus: Path, catalog_of_hard_files: videoflow.Catalog, name: str) -> None:
    video = Video(corpus / name)
    (first,) = video.frames(index=0)
    width, height = video.size
    assert first.image.shape == (height, width, 3)
    if name == "rotate_90.mov":
        assert (width, height) == (320, 568)
    command = [
        "ffmpeg",
        "-v",
        "error",
        "-i",
        str(corpus / name),
        "-map",
        "0:v:0",
        "-frames:v",
        "1",
        "-pix_fmt",
        "rgb24",
        "-f",
        "rawvideo",
        "-",
    ]
    golden = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8).reshape(
        height, width, 3
    )
    assert np.abs(first.image.astype(int) - golden).mean() < 2
    row = next(r for r in read_tsv("GRID.tsv") if r["file"] == name)
    _, cached = next(iter(decode_pass(corpus / name)))
    assert cached.shape == (int(row["height"]), int(row["width"]), 3)
    clips = catalog_of_hard_files.version("hard").clips(filter=f"uri LIKE '%{name}'").to_pylist()
    assert {(c["width"], c["height"]) for c in clips} <= {(int(row["width"]), int(row["height"]))}


# -- H09 -------------------------------------------------------------------------------------------------------------


def test_h09_clips_hold_exactly_their_frames(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "bug_inputs/keyframe_every_50.mp4"
    video = Video(source)
    shown = [f for f in video.frames(index=range(len(video))) if Fraction(22, 10) <= f.pts * video.time_base < 3]
    assert [read_barcode(f.image) for f in shown] == list(range(55, 75))

    manifest = tmp_path / "clips.jsonl"
    rows = [{"uri": str(source), "start": "2.20", "end": "3.00"}]
    rows += [{"uri": str(source), "start": f"{s / 25:.2f}", "end": f"{(s + 17) / 25:.2f}"} for s in range(234)]
    manifest.write_text("\n".join(json.dumps(r) for r in rows))
    version = run_local(
        Recipe(stages={"frames": {"fps": "25"}, "shots": {"detector": "hsv"}, "clips": {}}),
        [manifest],
        tmp_path / "cat",
    )
    clips = {(r["first_frame"], r["last_frame"]) for r in version.clips().to_pylist()}
    assert clips == {(s, s + 16) for s in range(234)} | {(55, 74)}
    with version.loader(
        batch_size=5, frames=17, fps=25, shuffle=False, epochs=1, tail="pad", filter="num_frames = 17"
    ) as loader:
        seen = 0
        for batch in loader:
            for b, key in enumerate(batch["clip_key"]):
                if batch["valid"][b]:
                    (row,) = version.clips(columns=["first_frame"], filter=f"clip_key = '{key}'").to_pylist()
                    pictures = batch["video"][b].permute(0, 2, 3, 1).numpy()
                    assert [read_barcode(p) for p in pictures] == list(
                        range(row["first_frame"], row["first_frame"] + 17)
                    )
                    seen += 1
    assert seen == 234


# -- H10 -------------------------------------------------------------------------------------------------------------


def test_h10_bad_files_stop_nothing(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good = ["bug_inputs/keyframe_every_50.mp4", "rotate_90.mov", "vp8_vorbis.webm"]
    vvc = "codec_without_decoder_vvc.mp4"  # bad only where the decoder in use lacks VVC
    bad = BAD if "vvc" in av.codecs_available else {**BAD, vvc: "codec_unsupported"}
    for name in [*BAD, *good, vvc]:
        shutil.copy(corpus / name, folder / Path(name).name)
    command = [
        sys.executable,
        "-m",
        "videoflow.cli.main",
        "run",
        "clips",
        "--source",
        str(folder),
        "--root",
        str(tmp_path / "cat"),
    ]
    command += ["--name", "x", "--engine", "local", "--max-quarantined", "100%", "--json"]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout.splitlines()[-1])
    assert (result["videos"], result["done"], result["quarantined"], result["pending"]) == (
        9,
        9 - len(bad),
        len(bad),
        0,
    )
    rows = videoflow.open(str(tmp_path / "cat")).quarantine()
    assert {Path(r["uri"]).name: r["class"] for r in rows} == bad
    assert len(rows) == len(bad)
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert json.loads(again.stdout.splitlines()[-1])["decoded_videos"] == 0


# -- H12, CPU half ---------------------------------------------------------------------------------------------------


def test_h12_full_range_colours(corpus: Path) -> None:
    for _, picture in decode_pass(corpus / "bug_inputs/full_range_two_colours.mp4"):
        left, right = picture[:, 8:40].reshape(-1, 3).mean(0), picture[:, 56:88].reshape(-1, 3).mean(0)
        assert np.abs(left - (180, 60, 60)).max() <= 4
        assert np.abs(right - (60, 180, 120)).max() <= 4


def run_local(recipe: Recipe, sources: list[Path], root: Path, name: str = "x") -> videoflow.dataset.version.Version:  # type: ignore[name-defined]
    from tests.jobs import run_job

    summary = run_job(recipe, sources, root, name=name)
    assert summary.version
    return videoflow.open(str(root)).version(summary.version)
