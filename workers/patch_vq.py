"""Patch-VQ: the tokenizer that needs no download. Pixels of small blocks, quantised by codebooks that k-means fits.

A clip is cut into blocks of ``temporal`` × ``spatial`` × ``spatial`` pixels; each becomes the number of the nearest
codeword, what is left over the number of the nearest in the next level's codebook, and so on (residual vector
quantisation: Juang & Gray 1982, "Multiple stage vector quantization for speech coding"). k-means is scikit-learn's
MiniBatchKMeans (Sculley 2010).

Ids are the same on every machine and in any grouping: pixels and codewords are whole numbers, and so are all sums
that decide which codeword is the nearest. Single precision holds them exactly below 2²⁴, and the order of additions
does not matter then; where a bound of the sums says that they may be larger, double precision is taken (2⁵³).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from videoflow.errors import MissingWeights, RecipeError
from videoflow.keys import digest, digest_bytes
from workers.tokenizers import need

#: Blocks that k-means sees, over all clips.
SAMPLE_BLOCKS = 32_768
#: Pixels are looked at around the middle grey: smaller sums.
MIDDLE = 128
EXACT_SINGLE = 1 << 24
FORMAT = 1


@dataclass(frozen=True)
class Codebook:
    """Codewords of all levels, and the blocks that they are of.

    Attributes:
        words: int16 (codes, temporal·spatial²·3) a level; level 0 in pixels around 0 (−128 … 127), later ones in
            differences (−255 … 255). A level has fewer codes where the data had no more different blocks.
    """

    temporal: int
    spatial: int
    words: tuple[np.ndarray, ...]

    @property
    def digest(self) -> str:
        """Of the numbers themselves, however they are kept."""
        raw = [[list(w.shape), digest_bytes(np.ascontiguousarray(w, "<i2").tobytes())] for w in self.words]
        return digest("patch-vq", FORMAT, self.temporal, self.spatial, raw)

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        values: dict[str, Any] = {f"level_{i}": w for i, w in enumerate(self.words)}
        np.savez(file, **values, format=FORMAT, temporal=self.temporal, spatial=self.spatial)
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes, *, where: str) -> Codebook:
        """A codebook as `to_bytes` wrote it.

        Raises:
            MissingWeights: it is something else.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as whole:
                if whole.testzip() is not None:  # numpy reads as much as it needs and so sees no checksum
                    raise ValueError("checksum")
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                if int(file["format"]) != FORMAT:
                    raise ValueError(f"format {int(file['format'])}")
                names = [f"level_{i}" for i in range(sum(n.startswith("level_") for n in file.files))]
                words = tuple(np.asarray(file[n], np.int16) for n in names)
                made = Codebook(int(file["temporal"]), int(file["spatial"]), words)
        except Exception as e:  # a zip file and numpy's headers may break in any way; what they advise is for others
            raise MissingWeights(f"{where} is no codebook of patch-vq, or a damaged one ({type(e).__name__})") from e
        if not words or any(w.ndim != 2 or w.shape[1] != made.temporal * made.spatial**2 * 3 for w in words):
            raise MissingWeights(f"{where} is no codebook of patch-vq: its codewords have another size than its blocks")
        return made


def blocks_of(video: np.ndarray, temporal: int, spatial: int) -> np.ndarray:
    """int16 (t, h, w, temporal·spatial²·3): the blocks of uint8 (T, H, W, 3), around 0."""
    t, h, w = video.shape[0] // temporal, video.shape[1] // spatial, video.shape[2] // spatial
    cut = video.reshape(t, temporal, h, spatial, w, spatial, 3).transpose(0, 2, 4, 1, 3, 5, 6)
    return cut.reshape(t, h, w, -1).astype(np.int16) - MIDDLE


def video_of(blocks: np.ndarray, temporal: int, spatial: int) -> np.ndarray:
    """The reverse: uint8 (T, H, W, 3), clipped."""
    t, h, w, _ = blocks.shape
    pixels = np.clip(blocks + MIDDLE, 0, 255).astype(np.uint8).reshape(t, h, w, temporal, spatial, spatial, 3)
    return pixels.transpose(0, 3, 1, 4, 2, 5, 6).reshape(t * temporal, h * spatial, w * spatial, 3)


def nearest(blocks: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Numbers of the nearest codewords (the first of equally near ones): int64 (n,) of int16 (n, D) and (codes, D)."""
    lengths = np.einsum("kd,kd->k", words, words, dtype=np.int64)
    reach = int(np.abs(blocks).max(initial=0)) * int(np.abs(words.astype(np.int64)).sum(axis=1).max())
    kind: Any = np.float32 if 2 * reach + int(lengths.max()) < EXACT_SINGLE else np.float64
    closeness: Any = blocks.astype(kind) @ (2 * words.astype(kind)).T  # |b − w|² = |b|² − (2 b·w − |w|²)
    closeness -= lengths.astype(kind)
    return np.asarray(closeness.argmax(axis=1))


class PatchVQ:
    """A tokenizer (see workers/tokenizers.py) over a codebook."""

    causal = False

    def __init__(self, codebook: Codebook) -> None:
        self.codebook = codebook
        self.temporal, self.spatial = codebook.temporal, codebook.spatial

    def encode(self, video: np.ndarray, *, seed: int = 0) -> np.ndarray:
        """Ids int32 (levels, t, h, w), or (t, h, w) where there is one level."""
        blocks = blocks_of(video, self.temporal, self.spatial)
        grid = blocks.shape[:3]
        ids = np.empty((len(self.codebook.words), *grid), np.int32)
        for t in range(grid[0]):  # a frame at a time stays in the processor's cache
            left = blocks[t].reshape(-1, blocks.shape[-1])
            for level, words in enumerate(self.codebook.words):
                found = nearest(left, words)
                ids[level, t] = found.reshape(grid[1:])
                left = left - words[found]
        return ids if len(ids) > 1 else ids[0]

    def decode(self, array: np.ndarray) -> np.ndarray:
        """uint8 (T, H, W, 3)."""
        levels = array.reshape(-1, *array.shape[-3:])
        blocks = sum(words[ids] for words, ids in zip(self.codebook.words, levels, strict=True))
        return video_of(np.asarray(blocks), self.temporal, self.spatial)


def fit(
    videos: Iterable[tuple[str, np.ndarray]], *, temporal: int, spatial: int, codes: int, levels: int, seed: int
) -> Codebook:
    """A codebook for (key, uint8 (T, H, W, 3)) videos, each of which gives the same number of blocks at most, chosen by
    its key and the seed.

    Raises:
        MissingExtra: scikit-learn is not installed. RecipeError: no video holds a block.
    """
    need("sklearn", package="scikit-learn", needed_for="tokenize with tokenizer: patch-vq", extra="patch-vq")
    chosen = list(_sampled(videos, temporal, spatial, seed))
    if not chosen:
        raise RecipeError(f"no clip holds a block of {temporal} frames of {spatial}×{spatial} pixels to learn from")
    share = max(1, SAMPLE_BLOCKS // len(chosen))
    left = np.concatenate([blocks[:share] for blocks in chosen]).astype(np.int16)
    words = []
    for level in range(levels):
        low, high = (-MIDDLE, 255 - MIDDLE) if level == 0 else (-255, 255)
        words.append(_k_means(left, codes, seed + level, low, high))
        left = left - words[-1][nearest(left, words[-1])]
    return Codebook(temporal, spatial, tuple(words))


def _sampled(videos: Iterable[tuple[str, np.ndarray]], temporal: int, spatial: int, seed: int) -> Iterator[np.ndarray]:
    """Of each video up to SAMPLE_BLOCKS / 16 blocks, in an order drawn from its key."""
    for key, video in videos:
        t, h, w = (n // step for n, step in zip(video.shape, (temporal, spatial, spatial), strict=False))
        if not t * h * w:
            continue
        order = np.random.default_rng(int(digest(key, seed)[:16], 16)).permutation(t * h * w)[: SAMPLE_BLOCKS // 16]
        whole = video[: t * temporal, : h * spatial, : w * spatial]
        yield blocks_of(whole, temporal, spatial).reshape(t * h * w, -1)[order]


def _k_means(blocks: np.ndarray, codes: int, seed: int, low: int, high: int) -> np.ndarray:
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    different = np.unique(blocks, axis=0)
    if len(different) <= codes:
        return different
    model = MiniBatchKMeans(codes, random_state=seed, batch_size=4096, max_iter=30, n_init=1, init_size=3 * codes)
    with threadpool_limits(limits=1):  # however many cores there are, the same sums
        centres = model.fit(blocks.astype(np.float32)).cluster_centers_
    return np.unique(np.clip(np.rint(centres), low, high).astype(np.int16), axis=0)
