"""Patch-VQ: the nearest codeword by whole numbers, whatever the grouping; PSNR as the codebook's own error bounds it."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from videoflow.errors import MissingWeights, RecipeError
from videoflow.stage import ClipFrames
from workers import patch_vq
from workers.decode import decode_pictures
from workers.patch_vq import Codebook, PatchVQ, blocks_of, fit, nearest, video_of
from workers.tokenize import Tokenize, TokenizeParams

pytest.importorskip("sklearn", reason="needs videoflow[patch-vq]")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.fixture(scope="module")
def bikes(corpus: Path) -> dict[str, np.ndarray]:
    """Real footage: four clips of eight frames of cuts_bikes.mp4, 8 frames/s, short side 128 or so."""
    frames = [rgb[::2, ::2] for _, rgb in decode_pictures(corpus / "cuts_bikes.mp4", fps=8)][:32]
    return {f"{i:032x}": np.stack(frames[i * 8 : i * 8 + 8]) for i in range(4)}


@pytest.fixture(scope="module")
def fitted(bikes: dict[str, np.ndarray]) -> Codebook:
    return fit(bikes.items(), temporal=1, spatial=8, codes=64, levels=2, seed=0)


def clips_of(videos: dict[str, np.ndarray]) -> list[ClipFrames]:
    return [ClipFrames(k, "v" * 32, v, np.arange(len(v)) / 8) for k, v in videos.items()]


def closest(blocks: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, squared distances) by the definition: every difference, squared and summed in 64-bit integers."""
    distance = ((blocks[:, None].astype(np.int64) - words[None]) ** 2).sum(axis=2)
    return distance.argmin(axis=1), distance.min(axis=1)


# ── what is computed ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("temporal", "spatial"), [(1, 8), (2, 4), (3, 1)])
def test_blocks_and_back(temporal: int, spatial: int) -> None:
    video = noise(temporal * 2, spatial * 3, spatial * 5, 3)
    blocks = blocks_of(video, temporal, spatial)
    assert blocks.shape == (2, 3, 5, temporal * spatial**2 * 3)
    corner = video[temporal:, spatial : 2 * spatial, 2 * spatial : 3 * spatial]
    assert np.array_equal(blocks[1, 1, 2], corner.astype(int).ravel() - 128)
    assert np.array_equal(video_of(blocks, temporal, spatial), video)


def test_a_picture_made_of_codewords_has_their_numbers() -> None:
    words = blocks_of(noise(1, 8, 8 * 50, 3, seed=1), 1, 8).reshape(50, -1)
    numbers = np.random.default_rng(2).integers(0, 50, (3, 4, 5))
    video = video_of(words[numbers], 1, 8)
    vq = PatchVQ(Codebook(1, 8, (words,)))
    assert np.array_equal(vq.encode(video), numbers)
    assert np.array_equal(vq.decode(numbers), video)
    shaken = np.clip(video.astype(int) + np.random.default_rng(3).integers(-9, 10, video.shape), 0, 255)
    assert np.array_equal(vq.encode(shaken.astype(np.uint8)), numbers)  # far nearer than any other of random words


@pytest.mark.parametrize(("dims", "spread"), [(12, 128), (192, 128), (3072, 128), (192, 255)])
def test_the_nearest_is_exact_in_single_and_in_double_precision(dims: int, spread: int) -> None:
    rng = np.random.default_rng(dims)
    words = rng.integers(-spread, spread, (40, dims)).astype(np.int16)
    words[7], words[9] = words[3], words[3]  # equally near: the first one counts
    blocks = rng.integers(-spread, spread, (300, dims)).astype(np.int16)
    blocks[:40] = words
    found = nearest(blocks, words)
    assert np.array_equal(found, closest(blocks, words)[0])
    assert found[[3, 7, 9]].tolist() == [3, 3, 3]


def test_near_ties_far_beyond_single_precision_are_told_apart() -> None:
    """Two words whose distances differ by 1 where |w|² is about 5·10⁷, beyond what single precision can tell."""
    dims = 3072
    block = np.full((1, dims), 127, np.int16)
    words = np.full((2, dims), -128, np.int16)
    words[0, 0], words[1, 0] = -128, -127
    assert 2 * 127 * 128 * dims > patch_vq.EXACT_SINGLE
    assert nearest(block, words).tolist() == [1]
    assert nearest(block, words[::-1]).tolist() == [0]


def test_any_grouping_gives_the_same_ids(bikes: dict[str, np.ndarray], fitted: Codebook) -> None:
    stage = Tokenize(TokenizeParams(codes=64, levels=2)).with_fit(fitted.to_bytes())
    clips = clips_of(bikes)
    together = {c.clip_key: p.rows[0] for c, p in zip(clips, stage.process(clips), strict=True)}
    for order in ([3], [1, 0], [2, 3, 1, 0], [0, 2]):
        for i, product in zip(order, stage.process([clips[i] for i in order]), strict=True):
            assert product.rows[0] == together[clips[i].clip_key]
    vq, video = PatchVQ(fitted), clips[0].video[:, :128, :296]
    alone = np.concatenate([vq.encode(video[i : i + 1]) for i in range(8)], axis=1)
    assert np.array_equal(alone, vq.encode(video))


# ── how good it is ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_psnr_is_what_the_codebook_allows(bikes: dict[str, np.ndarray], fitted: Codebook) -> None:
    """The bound: greedy residual quantisation by the definition. Clipping to 0 … 255 can only come nearer."""
    stage = Tokenize(TokenizeParams(codes=64, levels=2)).with_fit(fitted.to_bytes())
    for clip, product in zip(clips_of(bikes), stage.process(clips_of(bikes)), strict=True):
        row = product.rows[0]
        height, width = row["height"], row["width"]
        top, left = (clip.video.shape[1] - height) // 2, (clip.video.shape[2] - width) // 2
        seen = clip.video[:, top : top + height, left : left + width]
        left_over, squares, ids = blocks_of(seen, 1, 8).reshape(-1, 192), np.zeros(1), []
        for words in fitted.words:
            numbers, squares = closest(left_over, words)
            ids.append(numbers)
            left_over = left_over - words[numbers]
        bound = 10 * math.log10(255**2 * seen.size / squares.sum())
        stored = np.frombuffer(row["data"], row["dtype"]).reshape(row["shape"])
        assert np.array_equal(stored.reshape(2, -1), np.stack(ids))
        assert bound <= row["psnr"] < bound + 0.5
        assert row["psnr"] > 24.0
        assert row["ssim"] > 0.6


def test_a_level_more_is_nearer(bikes: dict[str, np.ndarray]) -> None:
    found = []
    for levels in (1, 2, 3):
        book = fit(bikes.items(), temporal=1, spatial=8, codes=32, levels=levels, seed=0)
        stage = Tokenize(TokenizeParams(codes=32, levels=levels)).with_fit(book.to_bytes())
        rows = [p.rows[0] for p in stage.process(clips_of(bikes))]
        assert {len(r["shape"]) for r in rows} == {3 if levels == 1 else 4}
        found.append(np.mean([r["psnr"] for r in rows]))
    assert found[0] + 0.5 < found[1] < found[2] - 0.2


# ── the codebook ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fit_can_be_repeated_and_kept(bikes: dict[str, np.ndarray], fitted: Codebook) -> None:
    again = fit(bikes.items(), temporal=1, spatial=8, codes=64, levels=2, seed=0)
    assert again.digest == fitted.digest
    kept = Codebook.from_bytes(fitted.to_bytes(), where="here")
    assert kept.digest == fitted.digest
    assert all(np.array_equal(a, b) for a, b in zip(kept.words, fitted.words, strict=True))
    assert fit(bikes.items(), temporal=1, spatial=8, codes=64, levels=2, seed=1).digest != fitted.digest


def test_few_different_blocks_are_a_small_and_perfect_codebook() -> None:
    flat = np.repeat(np.array([0, 90, 255], np.uint8), 8).reshape(1, 1, 24, 1).repeat(8, 1).repeat(3, 3)
    book = fit([("k" * 32, flat)], temporal=1, spatial=8, codes=16, levels=1, seed=0)
    assert sorted(book.words[0][:, 0].tolist()) == [-128, -38, 127]
    assert np.array_equal(PatchVQ(book).decode(PatchVQ(book).encode(flat)), flat)


def test_nothing_to_learn_from_and_what_is_no_codebook(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="2 frames of 8×8 pixels to learn from"):
        fit([("k" * 32, noise(1, 8, 8, 3))], temporal=2, spatial=8, codes=4, levels=1, seed=0)
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"no numbers")
    with pytest.raises(MissingWeights, match="is no codebook of patch-vq"):
        Tokenize(TokenizeParams(weights=str(bad))).identity()
    with pytest.raises(MissingWeights, match="no codebook at"):
        Tokenize(TokenizeParams(weights=str(tmp_path / "none"))).identity()
    wrong = Codebook(1, 4, (np.zeros((2, 192), np.int16),))
    with pytest.raises(MissingWeights, match="another size than its blocks"):
        Codebook.from_bytes(wrong.to_bytes(), where="x")


def test_a_codebook_from_elsewhere_by_its_path(fitted: Codebook, tmp_path: Path) -> None:
    paths = [tmp_path / "a.npz", tmp_path / "b" / "c.npz"]
    paths[1].parent.mkdir()
    for path in paths:
        path.write_bytes(fitted.to_bytes())
    one, two = (Tokenize(TokenizeParams(weights=str(p))) for p in paths)
    assert one.identity() == two.identity() == {"tokenizer": "patch-vq", "weights": fitted.digest}
    assert one.fit_key() is None
    assert one.params.model_dump() == two.params.model_dump()


def test_what_is_to_be_learned_hangs_on_the_parameters_that_decide_it() -> None:
    key = Tokenize(TokenizeParams()).fit_key()
    assert key is not None and "to be fitted" in Tokenize().identity()["weights"]
    same = [{"score": False}, {"latent_dtype": "float32"}, {"tiling": True}]
    other = [{"codes": 100}, {"levels": 1}, {"temporal": 2}, {"spatial": 4}, {"seed": 1}, {"fps": 4}, {"size": 64}]
    assert {Tokenize(TokenizeParams(**p)).fit_key() for p in same} == {key}
    assert len({Tokenize(TokenizeParams(**p)).fit_key() for p in other} | {key}) == len(other) + 1


def test_frames_and_sides_that_fit_no_block_are_left_out(fitted: Codebook) -> None:
    book = fit([("k" * 32, noise(4, 16, 16, 3))], temporal=4, spatial=8, codes=4, levels=1, seed=0)
    stage = Tokenize(TokenizeParams(temporal=4, levels=1, fps=4)).with_fit(book.to_bytes())
    assert stage.fps == Fraction(4)
    long, short, small = (noise(11, 30, 45, 3), noise(3, 30, 45, 3), noise(4, 7, 45, 3))
    one, two, three = stage.process([ClipFrames("c" * 32, "v", v, np.arange(len(v)) / 4) for v in (long, short, small)])
    row = one.rows[0]
    assert (row["num_frames"], row["grid"], row["height"], row["width"]) == (8, [2, 3, 5], 24, 40)
    assert (row["first_us"], row["last_us"]) == (0, 1_750_000)
    assert (two.filtered, three.filtered) == ("too_few_frames", "too_small")


def test_a_flipped_byte_is_found_or_means_nothing() -> None:
    book = Codebook(1, 4, tuple(np.random.default_rng(n).integers(-128, 128, (8, 48)).astype(np.int16) for n in (0, 1)))
    data = book.to_bytes()
    said, silent = [], 0
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 0xFF
        try:
            kept = Codebook.from_bytes(bytes(bad), where="x")
        except MissingWeights as e:
            said.append(str(e))
        else:
            silent += kept.digest != book.digest
    assert silent == 0 and len(said) > len(data) // 14  # the rest are dates and the like, which nobody reads
    assert all(s.startswith("x is no codebook of patch-vq") and "pickle" not in s for s in said)
