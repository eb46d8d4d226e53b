"""Frame truth: what the decode pass keeps of every hard file, against GRID.tsv and the FFmpeg command line."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import read_tsv
from videoflow.media.decoder import is_damaged
from videoflow.stage import VideoSummary
from videoflow.testing import decode_pass, read_barcode
from videoflow.timeline import steps_of
from workers.decode import PassResult, run_pass
from workers.frames import Frames
from workers.probe import Probe, videos_row

GRID = read_tsv("GRID.tsv")
BARCODES = [r["file"] for r in GRID if r["file"].startswith("bug_inputs/") and "two_colours" not in r["file"]]
MIN_PSNR = 38.0


def grid_row(name: str) -> dict[str, str]:
    return next(r for r in GRID if r["file"] == name)


def damage_of(row: dict[str, str], end_pts: int) -> list[tuple[int, int]]:
    if not row["damage_s"]:
        return []
    tb = Fraction(row["time_base"])
    a, b = row["damage_s"].split("-")
    return [(round(Fraction(a) / tb), end_pts if b == "end" else round(Fraction(b) / tb))]


def run(path: Path) -> tuple[PassResult, list[dict]]:
    rows: list[dict] = []
    result = run_pass(path, video_key="k", consumers=[Probe(), Frames()], sink=lambda name, row: rows.append(row))
    return result, rows


@pytest.mark.parametrize("row", GRID, ids=lambda r: r["file"])
def test_stream_size_pts_and_damage_equal_the_table(corpus: Path, row: dict[str, str]) -> None:
    result, chunks = run(corpus / row["file"])
    video, _ = videos_row(result.facts, result.summary)
    assert result.facts.stream == int(row["stream"])
    assert Fraction(video["tb_num"], video["tb_den"]) == Fraction(row["time_base"])
    assert {(c["width"], c["height"]) for c in chunks} == {(int(row["width"]), int(row["height"]))}
    assert [p for c in chunks for p in c["pts"]] == [int(x) for x in row["cached_pts"].split(",")]
    assert video["num_frames"] == int(row["shown_frames"])
    assert video["num_clean_frames"] == int(row["clean_frames"])
    assert (video["start_pts"], video["last_pts"]) == (int(row["first_pts"]), int(row["last_pts"]))
    got, want = list(result.summary.damage), damage_of(row, result.summary.end_pts)
    assert [a for a, _ in got] == [a for a, _ in want]
    assert [min(b, result.summary.end_pts) for _, b in got] == [b for _, b in want]


@pytest.mark.parametrize("name", BARCODES)
def test_every_clean_cached_frame_shows_its_own_number(corpus: Path, name: str) -> None:
    result, _ = run(corpus / name)
    shown = list(result.facts.decoder.tally.pts)  # type: ignore[union-attr]
    summary: VideoSummary = result.summary
    checked = 0
    for pts, rgb in decode_pass(corpus / name):
        if not is_damaged(pts, summary.damage):
            number = _number(name, shown, pts, result)
            assert read_barcode(rgb) == number
            checked += 1
    assert checked >= 20


def _number(name: str, shown: list[int], pts: int, result: PassResult) -> int:
    """Frame number by construction: the constant step counts lost frames too."""
    steps = steps_of(shown)
    step = Fraction(1480479, 1479) if "2997" in name else Fraction(min(steps))
    return round((pts - shown[0]) / step)


@pytest.mark.parametrize("row", GRID, ids=lambda r: r["file"])
def test_pictures_equal_ffmpeg(corpus: Path, row: dict[str, str]) -> None:
    w, h = int(row["width"]), int(row["height"])
    result, _ = run(corpus / row["file"])
    shown = list(result.facts.decoder.tally.pts)  # type: ignore[union-attr]
    wanted = [
        (shown.index(p), rgb)
        for p, rgb in decode_pass(corpus / row["file"])
        if not is_damaged(p, result.summary.damage)
    ]
    golden = ffmpeg_pictures(corpus / row["file"], int(row["stream"]), w, h)
    if golden is None:
        pytest.skip("the FFmpeg command line here has no decoder for this codec")
    error, count = 0.0, 0
    for index, rgb in wanted:
        assert rgb.shape == (h, w, 3)
        error += float(((rgb.astype(np.float64) - golden[index]) ** 2).mean())
        count += 1
    psnr = 10 * np.log10(255**2 / max(error / count, 1e-9))
    assert psnr >= MIN_PSNR


def ffmpeg_pictures(path: Path, stream: int, w: int, h: int) -> np.ndarray | None:
    command = ["ffmpeg", "-v", "error", "-nostdin", "-threads", "1", "-i", str(path), "-map", f"0:{stream}"]
    command += [
        "-fps_mode",
        "passthrough",
        "-vf",
        f"scale={w}:{h}:flags=area",
        "-pix_fmt",
        "rgb24",
        "-f",
        "rawvideo",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, check=False)
    if b"no decoder found" in done.stderr.lower() or (not done.stdout and b"vvc" in done.stderr.lower()):
        return None
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, h, w, 3)
