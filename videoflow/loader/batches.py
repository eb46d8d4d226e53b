"""One batch, step by step: plan → read → decode → copy → transform. No threads and no clocks in here.

``BatchMaker`` holds what all batches of a loader share; each of its methods is one stage and takes what the one before
returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from videoflow.loader.attached import ArrayColumn, ArraysRead
from videoflow.loader.embeddings import EmbeddingReader
from videoflow.loader.engine import DecodeEngine, refuse_mixed_sizes
from videoflow.loader.order import Order
from videoflow.loader.reader import ClipReader, EncodedClip
from videoflow.loader.rows import EMBEDDING, VersionRows
from videoflow.loader.sampling import Sampling
from videoflow.loader.sound import ClipSound, SoundReader

Batch = dict[str, Any]


@dataclass(frozen=True)
class BatchPlan:
    """What one rank takes of one global batch.

    Attributes:
        rows: int64 (n,), rows of the version; n < num_slots in a padded tail.
        num_slots: b = batch_size / world_size.
        num_frames: T, the same on every rank; 0 if no pictures were asked for.
        size: (H, W) of the batch, the same on every rank.
        shapes: of an array of each column of arrays, the same on every rank.
    """

    rows: np.ndarray
    num_slots: int
    num_frames: int
    size: tuple[int, int]
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class BatchRead:
    """A plan with its encoded frames, embeddings, float32 (n, D) or None, and arrays by column."""

    plan: BatchPlan
    clips: list[EncodedClip]
    embeddings: np.ndarray | None
    sounds: list[ClipSound]
    arrays: tuple[ArraysRead, ...] = ()


@dataclass(frozen=True)
class BatchDecoded:
    """What was read, with its pictures: uint8 (n, T, H, W, 3), array or tensor, or None where n is 0."""

    read: BatchRead
    video: Any
    sound: dict[str, np.ndarray]


class BatchMaker:
    """Makes the batches of one rank.

    Args:
        rows, sampling, order: the version's rows, what is taken of each, and in which order.
        reader, embeddings, engine: where frames and vectors come from and what decodes them; ``embeddings`` None: not
            asked for. arrays: the columns of arrays.
        size, fit: see ``DecodeEngine.decode``.
        rank, world_size: this rank takes slots [rank·B/world_size, (rank + 1)·B/world_size).
        device: where the batch's tensors go, None for the CPU.
        transform: last step, batch → batch.
        sound: brings the frames' sound, if it was asked for.
    """

    def __init__(
        self,
        *,
        rows: VersionRows,
        sampling: Sampling,
        order: Order,
        reader: ClipReader,
        embeddings: EmbeddingReader | None,
        arrays: Sequence[ArrayColumn],
        engine: DecodeEngine,
        size: tuple[int, int] | None,
        fit: str,
        rank: int,
        world_size: int,
        device: str | None,
        transform: Callable[[Batch], Batch] | None,
        sound: SoundReader | None = None,
    ) -> None:
        self._rows, self._sampling, self._order = rows, sampling, order
        self._reader, self._embeddings, self._engine = reader, embeddings, engine
        self._size, self._fit = size, fit
        self._arrays = tuple(arrays)
        self._num_slots = order.batch_size // world_size
        self._rank = rank
        self._device, self._sound = device, sound
        self._transform = transform
        self._columns = {name: _Column(array) for name, array in rows.scalars.items()}

    def plan(self, at: tuple[int, int]) -> BatchPlan:
        """Choose the rows of (epoch, step)."""
        everyones = self._sampling.kept[self._order.batch(*at).items]
        mine = everyones[self._rank * self._num_slots : (self._rank + 1) * self._num_slots]
        num_frames = int(self._sampling.num_frames[everyones].max())
        shapes = tuple(a.shape(everyones) for a in self._arrays)
        size = self._size or ((0, 0) if not num_frames else None)
        if size is None:
            sizes = {(int(h), int(w)) for h, w in np.unique(self._rows.sizes[everyones], axis=0)}
            refuse_mixed_sizes(sizes)
            size = sizes.pop()
        return BatchPlan(mine, self._num_slots, num_frames, size, shapes)

    def read(self, plan: BatchPlan) -> BatchRead:
        """Fetch encoded frames, vectors and arrays. Raises BadSample or SystemFailure."""
        arrays = tuple(a.read(plan.rows) for a in self._arrays)
        refs = self._rows.clip_refs(plan.rows) if plan.num_frames else []
        first_grid = self._rows.ints["first_grid"]
        wanted = [self._sampling.grid_indices(int(row), int(first_grid[row])).tolist() for row in plan.rows]
        clips = self._reader.read(refs, wanted, num_frames=plan.num_frames) if refs else []
        vectors = None
        if self._embeddings is not None and len(plan.rows):
            vectors = self._embeddings.read(self._rows.keys(plan.rows), *self._rows.embedding_refs(plan.rows))
        sounds = self._sound.read(plan.rows.tolist(), clips, refs) if self._sound is not None else []
        return BatchRead(plan, clips, vectors, sounds, arrays)

    def decode(self, read: BatchRead) -> BatchDecoded:
        """Make pictures and sound. Raises BadSample."""
        num_frames = read.plan.num_frames
        sound = self._sound.decode(read.sounds, num_frames=num_frames) if self._sound is not None else {}
        if not read.clips:
            return BatchDecoded(read, None, sound)
        return BatchDecoded(read, self._engine.decode(read.clips, size=self._size, fit=self._fit), sound)

    def copy(self, decoded: BatchDecoded) -> Batch:
        """Hand over to torch and to the device; fill up a padded tail."""
        import torch

        plan = decoded.read.plan
        num_padded = plan.num_slots - len(plan.rows)
        batch: Batch = {
            **(self._pictures(decoded) if plan.num_frames else {}),
            "valid": np.arange(plan.num_slots) < len(plan.rows),
            "clip_key": self._rows.keys(plan.rows) + [""] * num_padded,
            "position": _padded(self._rows.ints["position"][plan.rows], num_padded, fill=-1),
        }
        for arrays, read, shape in zip(self._arrays, decoded.read.arrays, plan.shapes, strict=True):
            batch |= arrays.tensors(read, shape, plan.num_slots)
        batch |= {name: _padded(values, num_padded) for name, values in decoded.sound.items()}
        if self._embeddings is not None:
            vectors = decoded.read.embeddings
            vectors = np.zeros((0, self._embeddings.dim), dtype=np.float32) if vectors is None else vectors
            batch[EMBEDDING] = _padded(vectors, num_padded)
        for name, column in self._columns.items():
            batch[name] = column.take(plan.rows, num_padded)
        made = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
        if self._device is None:
            return made
        return {k: v.to(self._device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}

    def transform(self, batch: Batch) -> Batch:
        """The user's own last step."""
        return batch if self._transform is None else self._transform(batch)

    def _pictures(self, decoded: BatchDecoded) -> Batch:
        plan, clips = decoded.read.plan, decoded.read.clips
        num_padded = plan.num_slots - len(clips)
        no_frames = np.zeros((0, plan.num_frames))
        return {
            "video": self._video(decoded),
            "pts_seconds": _padded(np.stack([c.pts_seconds for c in clips]) if clips else no_frames, num_padded),
            "frame_valid": _padded(
                np.array([c.frame_valid for c in clips], dtype=bool) if clips else no_frames.astype(bool), num_padded
            ),
        }

    def _video(self, decoded: BatchDecoded) -> Any:
        import torch

        plan, video = decoded.read.plan, decoded.video
        num_padded = plan.num_slots - len(decoded.read.clips)
        if isinstance(video, np.ndarray):
            video = torch.from_numpy(video)
        if num_padded:
            black = torch.zeros(
                (num_padded, plan.num_frames, *plan.size, 3), dtype=torch.uint8, device=getattr(video, "device", None)
            )
            video = black if video is None else torch.cat([video, black])
        return video.permute(0, 1, 4, 2, 3)


def _padded(values: np.ndarray, num_padded: int, fill: int = 0) -> np.ndarray:
    """Values with ``num_padded`` more along the first axis."""
    if not num_padded:
        return values
    return np.concatenate([values, np.full((num_padded, *values.shape[1:]), fill, dtype=values.dtype)])


class _Column:
    """A scalar column: numbers become arrays of one dtype whatever a batch holds, text and booleans with nulls become
    lists.
    """

    def __init__(self, array: Any) -> None:
        dtype = array.type
        self._as_list = pa.types.is_string(dtype) or (pa.types.is_boolean(dtype) and array.null_count > 0)
        self._blank = "" if pa.types.is_string(dtype) else None
        if pa.types.is_integer(dtype):
            array = array.cast(pa.float64() if array.null_count else pa.int64())
        elif pa.types.is_float16(dtype):
            array = array.cast(pa.float32())
        self._values: Any = array if self._as_list else array.to_numpy(zero_copy_only=False)

    def take(self, rows: np.ndarray, num_padded: int) -> np.ndarray | list[Any]:
        """Values of rows, then blanks; nulls of number columns are NaN."""
        if self._as_list:
            values: Sequence[Any] = self._values.take(pa.array(rows)).to_pylist()
            return [*values, *[self._blank] * num_padded]
        return _padded(self._values[rows], num_padded)
