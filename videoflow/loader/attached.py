"""Arrays that stages made of clips (token ids, latents, outputs of a text encoder), read by row id and put together.

Clips whose arrays have one shape come as they lie in Arrow's own memory, without a copy; others are padded with zeros
at the end of every axis. Token ids are stored in as few bytes as they need and widened to int32 here, since that is
what an embedding layer takes. Each row is checked to be the asked clip's own, since Lance leaves out missing ids
without a word, and its bytes against their CRC.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from videoflow.errors import BadSample, LoaderError
from videoflow.loader.buffers import BufferPool
from videoflow.loader.reader import PartSet
from videoflow.store.schemas import ARRAY_REF

#: Numpy has no bfloat16: its bits travel as integers until they are a tensor's.
BFLOAT16 = "bfloat16"
CRC = "crc"
#: Columns of outputs of a text encoder, whose mask has a name of its own; see `mask_name`.
_TEXT = "text_"


def is_array(dtype: pa.DataType) -> bool:
    """True for a version's column of references to arrays."""
    return bool(dtype == ARRAY_REF)


def mask_name(column: str) -> str:
    """Under which name a batch says which entries of a column are real: ``text_mask``, or like ``tokens_valid``."""
    return "text_mask" if column.startswith(_TEXT) else f"{column}_valid"


class ArrayRefs:
    """Where the arrays of one column lie, for the chosen rows of a version.

    Attributes:
        parts, row_ids: int64 (n,). shapes: int64 (n, axes).
        owners: by name of the column that tells them, the keys that the rows must have (clips and videos).
    """

    def __init__(self, name: str, column: pa.StructArray, owners: dict[str, pa.Array]) -> None:
        if column.null_count:
            raise LoaderError(
                f"{column.null_count} of {len(column)} clips have no {name}; leave them out with filter='{name} IS NOT "
                "NULL', or run the stage that makes them and publish a new version"
            )
        self.name, self.owners = name, owners
        self.parts, self.row_ids = (np.asarray(column.field(f), np.int64) for f in ("part", "row_id"))
        shapes = column.field("shape")
        flat, axes = np.asarray(shapes.flatten(), np.int64), np.diff(np.asarray(shapes.offsets, np.int64))
        if (axes != axes[:1]).any():
            raise LoaderError(f"columns: arrays of {name} have different numbers of axes, {sorted(set(axes.tolist()))}")
        self.shapes = flat.reshape(len(column), -1)


@dataclass(frozen=True)
class ArraysRead:
    """Arrays of n clips as they were stored: bytes of each, the type they share, and all of them as one buffer."""

    data: list[Any]
    dtype: str
    whole: Any
    shapes: np.ndarray


class ArrayColumn:
    """Reads one column of arrays. ``refs``: of all rows that the loader chose among."""

    def __init__(self, refs: ArrayRefs, parts: Sequence[str], storage_options: dict[str, str] | None = None) -> None:
        self._refs = refs
        self._parts = PartSet(parts, storage_options)
        self._pool = BufferPool()

    @property
    def name(self) -> str:
        return self._refs.name

    def shape(self, rows: np.ndarray) -> tuple[int, ...]:
        """The shape that holds the arrays of some rows, those of all ranks."""
        return tuple(int(n) for n in self._refs.shapes[rows].max(axis=0, initial=0))

    def read(self, rows: np.ndarray) -> ArraysRead:
        """Arrays of rows, in order.

        Raises:
            BadSample: a row is gone, belongs to another clip, or holds another array than the version says.
            SystemFailure: storage fails again and again.
        """
        parts = np.unique(self._refs.parts[rows])
        data: list[Any] = [None] * len(rows)
        dtypes: set[str] = set()
        whole = None
        for part in parts.tolist():
            at = np.flatnonzero(self._refs.parts[rows] == part)
            table = self._take(part, rows[at])
            dtypes.update(table["dtype"].to_pylist())
            column = table["data"].combine_chunks()
            for i, value in zip(at.tolist(), column, strict=True):
                data[i] = value.as_buffer()
            self._prove(table, [data[i] for i in at.tolist()], rows[at])
            whole = _one_buffer(column) if len(parts) == 1 else None
        if len(dtypes) > 1:
            raise BadSample(f"{self.name}: one batch holds arrays of types {', '.join(sorted(dtypes))}")
        return ArraysRead(data, dtypes.pop() if dtypes else "uint8", whole, self._refs.shapes[rows])

    def _prove(self, table: pa.Table, data: Sequence[Any], rows: np.ndarray) -> None:
        """Raises BadSample where bytes are not those that were written."""
        for crc, own, row in zip(
            table["crc"].to_pylist() if CRC in table.column_names else (), data, rows, strict=False
        ):
            if zlib.crc32(own) != crc:
                name = next(n for n in self._refs.owners if n in table.column_names)
                key = self._refs.owners[name][int(row)].as_py()
                raise BadSample(f"{name.removesuffix('_key')} {key}: its {self.name} fail their CRC")

    def _take(self, part: int, rows: np.ndarray) -> pa.Table:
        ids = self._refs.row_ids[rows].tolist()
        names = self._parts[part].schema.names
        owner = next(n for n in self._refs.owners if n in names)
        proof = [CRC] if CRC in names else []  # tables of earlier builds have none
        table = self._parts.take(part, ids, [owner, "shape", "dtype", "data", *proof])
        owners = self._refs.owners[owner].take(pa.array(rows)).to_pylist()
        shapes = [tuple(s) for s in self._refs.shapes[rows].tolist()]
        if table[owner].to_pylist() != owners or [tuple(s) for s in table["shape"].to_pylist()] != shapes:
            for row, key, shape in zip(rows.tolist(), owners, shapes, strict=True):
                one = self._parts.take(part, [int(self._refs.row_ids[row])], [owner, "shape"]).to_pylist()
                if one != [{owner: key, "shape": list(shape)}]:
                    raise BadSample(
                        f"{self.name} of {owner.removesuffix('_key')} {key} (part {part}, row "
                        f"{self._refs.row_ids[row]}) is gone or is another's"
                    )
        return table

    def tensors(self, read: ArraysRead, shape: tuple[int, ...], num_slots: int) -> dict[str, Any]:
        """A batch's entries: the arrays (num_slots, *shape), and a mask (num_slots, …) of what is real.

        The mask has one axis less where the arrays have channels: (b, t, h, w) for a grid, (b, L) for text.
        """
        import torch

        kind = np.dtype(np.uint16 if read.dtype == BFLOAT16 else read.dtype)
        widened = np.dtype(np.int32) if kind.kind in "iu" and read.dtype != BFLOAT16 else kind
        fits = len(read.data) == num_slots and bool((read.shapes == np.array(shape)).all())
        values = _check_sizes(self.name, read, kind)
        if fits and widened == kind and read.whole is not None:
            # DLPack carries no "read-only": nobody else holds this memory, so the trainer may write to it.
            numbers = pa.Array.from_buffers(pa.from_numpy_dtype(kind), num_slots * math.prod(shape), [None, read.whole])
            made = torch.from_dlpack(numbers).reshape(num_slots, *shape)
        else:
            out = self._pool.take((num_slots * math.prod(shape) * widened.itemsize,)).view(widened)
            out = out.reshape(num_slots, *shape)
            if not fits:
                out[...] = 0
            for i, own in enumerate(read.shapes.tolist()):
                out[i][_first(own)] = values[i].reshape(own)
            made = torch.from_numpy(out)
        if read.dtype == BFLOAT16:
            made = made.view(torch.bfloat16)
        mask = _mask(read.shapes, shape, num_slots, is_text=self.name.startswith(_TEXT))
        return {self.name: made, mask_name(self.name): torch.from_numpy(mask)}


def _one_buffer(column: pa.Array) -> Any:
    """The bytes of all values, which lie side by side."""
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
    return column.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _check_sizes(name: str, read: ArraysRead, kind: np.dtype) -> list[np.ndarray]:
    values = []
    for data, shape in zip(read.data, read.shapes.tolist(), strict=True):
        if data.size != math.prod(shape) * kind.itemsize:
            raise BadSample(f"{name}: a row holds {data.size} bytes for an array of shape {tuple(shape)}, {read.dtype}")
        values.append(np.frombuffer(data, kind))
    return values


def _mask(shapes: np.ndarray, shape: tuple[int, ...], num_slots: int, *, is_text: bool) -> np.ndarray:
    axes = slice(0, 1) if is_text else slice(len(shape) - 3, len(shape))
    mask = np.zeros((num_slots, *shape[axes]), np.bool_)
    for i, own in enumerate(shapes[:, axes].tolist()):
        mask[i][_first(own)] = True
    return mask


def _first(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)
