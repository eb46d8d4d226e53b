"""Embeddings by row id, each checked to be the asked clip's own: Lance leaves out missing ids without a word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from videoflow.errors import BadSample
from videoflow.loader.reader import PartSet


class EmbeddingReader:
    """Reads vectors of clips from the parts of an embeddings table."""

    def __init__(self, parts: Sequence[str], storage_options: dict[str, str] | None = None) -> None:
        self._parts = PartSet(parts, storage_options)

    @property
    def dim(self) -> int:
        """D, the length of a vector."""
        return int(self._parts[0].schema.field("vector").type.list_size)

    def read(self, clip_keys: Sequence[str], parts: np.ndarray, row_ids: np.ndarray) -> np.ndarray:
        """Vectors of clips, in order: float32 (n, D).

        Args:
            clip_keys: (n,) whose vectors they must be.
            parts, row_ids: int64 (n,) each.

        Raises:
            BadSample: a row is gone or belongs to another clip; the clip is named.
        """
        vectors: dict[str, np.ndarray] = {}
        for part in np.unique(parts):
            ids = np.unique(row_ids[parts == part])
            table = self._parts.take(int(part), [int(i) for i in ids], ["clip_key", "vector"])
            vectors.update(zip(table["clip_key"].to_pylist(), _matrix(table["vector"]), strict=True))
        for key, part, row_id in zip(clip_keys, parts, row_ids, strict=True):
            if key not in vectors:
                raise BadSample(
                    f"clip {key}: its embedding (part {part}, row {row_id}) is gone or belongs to another clip"
                )
        return np.stack([vectors[key] for key in clip_keys])


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A fixed-size list column as float32 (n, D)."""
    array = column.combine_chunks()
    flat = array.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    return flat.reshape(len(array), array.type.list_size)
