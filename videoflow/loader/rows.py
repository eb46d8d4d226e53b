"""A version's rows as the loader needs them: read once, kept as Arrow and numpy columns, made into objects a batch at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.errors import LoaderError, SystemFailure, shown
from videoflow.loader.attached import ArrayRefs, is_array
from videoflow.loader.reader import BlobRef, ClipRef, VersionSource
from videoflow.loader.sampling import FrameCount, Sampling, parse_fps, sample_clips, without_frames
from videoflow.loader.sound import COLUMNS as SOUND_COLUMNS
from videoflow.loader.sound import SoundRows, check_audio
from videoflow.loader.state import LoaderConfig
from videoflow.persist import told
from videoflow.store.damage import is_panic
from videoflow.timeline import Grid

INTEGERS = (
    "tb_num",
    "tb_den",
    "start_pts",
    "width",
    "height",
    "cache_fps_num",
    "cache_fps_den",
    "first_grid",
    "grid_count",
    "position",
)
#: Names a batch uses itself.
BATCH_NAMES = frozenset(
    {"video", "pts_seconds", "frame_valid", "valid", "clip_key", "position"}
    | {"audio", "audio_valid", "audio_start_seconds"}
)
EMBEDDING, PAYLOAD = "embedding", "payload"
#: Whose an array is: a clip's, or all clips' of a video.
OWNERS = ("clip_key", "video_key")


class VersionRows:
    """The chosen rows of a version, in order of position.

    Attributes:
        ints: int64 (n,) by column name, see INTEGERS.
        scalars: the asked columns as Arrow arrays. arrays: where those of them lie that lead to arrays.
        sound: where their sound lies, if it was asked for.
    """

    def __init__(self, table: pa.Table, columns: Sequence[str], *, audio: bool = False) -> None:
        positions = table["position"].to_numpy()
        if np.any(positions[1:] <= positions[:-1]):
            table = table.take(pa.array(np.argsort(positions, kind="stable")))
        self.ints = {name: table[name].to_numpy().astype(np.int64) for name in INTEGERS}
        arrays = {name for name in columns if is_array(table.schema.field(name).type)}
        self.scalars = {name: table[name].combine_chunks() for name in columns if name not in {EMBEDDING, *arrays}}
        owners = {name: table[name].combine_chunks() for name in OWNERS if name in table.column_names}
        self.arrays = [ArrayRefs(n, table[n].combine_chunks(), owners) for n in columns if n in arrays]
        self._keys = table["clip_key"].combine_chunks()
        frames = table["frames"].combine_chunks()
        frames = pa.concat_arrays(frames.chunks) if isinstance(frames, pa.ChunkedArray) else frames
        self._ref_starts = frames.offsets.to_numpy()
        self._refs = {name: _child(frames.values, name) for name in BlobRef._fields}
        self._embedding = _embedding_refs(table) if EMBEDDING in columns else None
        self.sound = SoundRows(table) if audio else None

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"VersionRows({len(self)} clips)"

    @property
    def clip_keys(self) -> Any:
        """Clip keys by row, for an error's message."""
        return self._keys

    @property
    def sizes(self) -> np.ndarray:
        """Cached (height, width): int64 (n, 2)."""
        return np.stack([self.ints["height"], self.ints["width"]], axis=1)

    def keys(self, rows: np.ndarray) -> list[str]:
        return list(self._keys.take(pa.array(rows)).to_pylist())

    def clip_refs(self, rows: np.ndarray) -> list[ClipRef]:
        """What the reader needs of some rows."""
        return [self._clip_ref(int(row), key) for row, key in zip(rows, self.keys(rows), strict=True)]

    def _clip_ref(self, row: int, key: str) -> ClipRef:
        ints = {name: int(column[row]) for name, column in self.ints.items()}
        span = range(int(self._ref_starts[row]), int(self._ref_starts[row + 1]))
        refs = tuple(BlobRef(*(int(self._refs[name][i]) for name in BlobRef._fields)) for i in span)
        rate = Fraction(ints["cache_fps_num"], ints["cache_fps_den"])
        grid = Grid(ints["start_pts"], Fraction(ints["tb_num"], ints["tb_den"]), rate)
        return ClipRef(key, refs, grid, ints["height"], ints["width"])

    def embedding_refs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(parts, row ids) of some rows' embeddings: int64 (n,) each; the column must have been asked for."""
        if self._embedding is None:
            raise LoaderError("the embedding column was not asked for; use columns=('embedding',)")
        return self._embedding[0][rows], self._embedding[1][rows]


def _child(array: pa.StructArray, name: str) -> np.ndarray:
    return np.asarray(array.field(name).to_numpy(zero_copy_only=False), dtype=np.int64)


def _embedding_refs(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    column = table[EMBEDDING].combine_chunks()
    if column.null_count:
        raise LoaderError(
            f"{column.null_count} of {len(column)} clips have no embedding; leave them out with filter='embedding "
            "IS NOT NULL', "
            "or run the embed stage on them and publish a new version"
        )
    return _child(column, "part"), _child(column, "row_id")


def load_rows(
    source: VersionSource, *, split: str | None, where: str | None, columns: Sequence[str], audio: bool = False
) -> VersionRows:
    """The rows of a version that a loader on the frame cache needs; see `load_table`."""
    return VersionRows(load_table(source, split=split, where=where, columns=columns, audio=audio), columns, audio=audio)


def sample_rows(rows: VersionRows, config: LoaderConfig) -> Sampling:
    """What a loader takes of each of its rows: frames, or none where it reads no pictures."""
    if not config.frames:
        return without_frames(len(rows))
    return sample_clips(
        grid_count=rows.ints["grid_count"],
        cache_fps=(rows.ints["cache_fps_num"], rows.ints["cache_fps_den"]),
        frames=FrameCount.parse(config.frames),
        fps=parse_fps(config.fps),
        short=config.short,
        allow_uneven=config.allow_uneven,
        clip_keys=rows.clip_keys,
    )


def open_version(source: VersionSource) -> Any:
    """The Lance dataset of a version's clips. Raises SystemFailure: it cannot be opened."""
    try:
        return lance.dataset(source.clips_uri, storage_options=source.storage_options)
    except BaseException as e:
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        raise SystemFailure(f"cannot open version {source.id}: {told(e)}") from e


def load_table(
    source: VersionSource,
    *,
    split: str | None,
    where: str | None,
    columns: Sequence[str],
    audio: bool = False,
    more: Sequence[str] = (),
) -> pa.Table:
    """Read the columns of a version that a loader needs.

    Args:
        split: rows of this split only.
        where: SQL condition on the version's columns (Lance's filter syntax), together with the split.
        columns: further columns for the batches. audio: whether their sound is wanted.
        more: columns that the loader itself needs.

    Raises:
        LoaderError: an unknown column, a condition that is no SQL, or no row that meets it.
        SystemFailure: the version cannot be read.
    """
    dataset = open_version(source)
    check_columns(columns, dataset.schema, source)
    if audio:
        check_audio(dataset.schema.names, source.id)
    sound = SOUND_COLUMNS if audio else ()
    owners = OWNERS if any(is_array(dataset.schema.field(name).type) for name in columns) else ()
    wanted = list(dict.fromkeys([*INTEGERS, "clip_key", "frames", *columns, *more, *sound, *owners]))
    conditions = [f"({where})"] if where else []
    if split is not None:
        conditions.append("split = '" + split.replace("'", "''") + "'")
    try:
        scanner = dataset.scanner(columns=wanted, filter=" AND ".join(conditions) or None)
        scanner.explain_plan()  # reads no row: it is the condition that fails
    except Exception as e:
        if not where:
            raise SystemFailure(f"cannot read version {source.id}: {told(e)}") from e
        raise LoaderError(f"filter={where!r} cannot be used on version {source.id}: {told(e)}") from e
    try:
        table = scanner.to_table()
        table.validate(full=True)
    except BaseException as e:
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        raise SystemFailure(f"cannot read version {source.id}: {told(e)}") from e
    if table.num_rows == 0:
        raise LoaderError(f"no clip of version {source.id} has {_asked(split, where)}{_splits_of(dataset, split)}")
    return table


def _asked(split: str | None, where: str | None) -> str:
    asked = [f"split={split!r}"] * (split is not None) + [f"filter={where!r}"] * bool(where)
    return " and ".join(asked) or "any rows: it is empty"


def _splits_of(dataset: Any, split: str | None) -> str:
    if split is None:
        return ""
    names = pc.unique(dataset.scanner(columns=["split"]).to_table()["split"]).to_pylist()
    return f"; its splits are {', '.join(sorted(str(n) for n in names))}"


def check_columns(columns: Sequence[str], schema: pa.Schema, source: VersionSource) -> None:
    """Raises LoaderError for columns that a batch cannot carry."""
    fit = [f.name for f in schema if f.name not in BATCH_NAMES and _is_deliverable(f)]
    for name in columns:
        if name in BATCH_NAMES:
            raise LoaderError(f"columns: {name!r} is in every batch already; leave it out")
        if name not in fit:
            raise LoaderError(
                f"columns: version {source.id} has no single-valued column {shown(name)}; it has {', '.join(fit)}"
            )
    if EMBEDDING in columns and not source.tables.get("embeddings"):
        raise LoaderError(
            f"columns: version {source.id} has no embeddings; add the embed stage to the recipe and publish a new "
            "version"
        )


def _is_deliverable(field: pa.Field) -> bool:
    dtype = field.type
    if field.name == EMBEDDING or is_array(dtype):
        return True
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    return any(is_kind(dtype) for is_kind in kinds)
