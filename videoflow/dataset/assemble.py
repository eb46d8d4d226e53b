"""From artifact tables to the flat rows of a version: every clip with its references into the frame cache.

Used twice: clip stages (embed) read frames through these references, and a version is these rows plus scores and
metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from videoflow.loader.reader import BlobRef, ClipRef
from videoflow.manifest import EXACT_IN_FLOAT, INT64
from videoflow.store import schemas
from videoflow.store.layout import Root
from videoflow.store.reader import PART, ROW_ID, rows_of
from videoflow.timeline import Grid

#: What a clip stage is given of one clip at most; 10 s at 8 frames/s are 80.
MAX_FRAMES_PER_CLIP = 256
_CHUNK_COLUMNS = ("item_key", "video_key", "chunk", "width", "height", "pts", "offsets")


@dataclass(frozen=True)
class CachedVideo:
    """One video in the frame cache: its pictures' size, all cached pts, and the chunks that hold them, in order.

    ``chunks``: (part, row id, offsets of its records and the end of the last) of each.
    """

    width: int
    height: int
    pts: list[int]
    chunks: list[tuple[int, int, list[int]]]

    def refs(self, first: int, last: int) -> tuple[BlobRef, ...]:
        """Where the records of frames first … last lie: one byte range a chunk, its records lie side by side."""
        found, at = [], 0
        for part, row_id, offsets in self.chunks:
            n = len(offsets) - 1
            a, b = max(first - at, 0), min(last + 1 - at, n)
            if a < b:
                found.append(BlobRef(part, row_id, offsets[a], offsets[b] - offsets[a]))
            at += n
        return tuple(found)


@dataclass(frozen=True)
class CachedClip:
    """A clip row (of the clips table) with its place on the cache's grid; ``refs`` cover exactly the frames it
    needs.
    """

    row: dict[str, Any]
    grid: Grid
    indices: range
    video: CachedVideo
    refs: tuple[BlobRef, ...]

    @property
    def ref(self) -> ClipRef:
        return ClipRef(self.row["clip_key"], self.refs, self.grid, self.video.height, self.video.width)


def cached_videos(root: Root, parts: Sequence[str], item_keys: Collection[str]) -> dict[str, CachedVideo]:
    """The frame cache's light columns of these items, by video key."""
    table = rows_of(root, parts, item_keys, columns=_CHUNK_COLUMNS, with_row_ids=True)
    by_video: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        by_video.setdefault(row["video_key"], []).append(row)
    found = {}
    for key, chunks in by_video.items():
        chunks.sort(key=lambda c: c["chunk"])
        pts = [p for c in chunks for p in c["pts"]]
        places = [(c[PART], c[ROW_ID], c["offsets"]) for c in chunks]
        found[key] = CachedVideo(chunks[0]["width"], chunks[0]["height"], pts, places)
    return found


def place_clip(row: dict[str, Any], video: CachedVideo | None, cache_rate: Fraction) -> CachedClip | None:
    """A clip on its cache's grid; None if no grid time lies in it (``filtered(no_cached_frame)``)."""
    grid = Grid(row["start_pts"], Fraction(row["tb_num"], row["tb_den"]), cache_rate)
    indices = grid.indices(row["t0_pts"], row["t1_pts"])
    if video is None or not indices:
        return None
    first, last = grid.frame_positions(video.pts, (indices[0], indices[-1]))
    if first < 0:
        return None
    return CachedClip(row, grid, indices, video, video.refs(first, last))


def distinct_frames(clip: CachedClip, indices: Sequence[int]) -> tuple[int, ...]:
    """Grid indices that show different frames: a frame that is shown for hours is looked at once. At most
    MAX_FRAMES_PER_CLIP, evenly spread."""
    first: dict[int, int] = {}
    for k, position in zip(indices, clip.grid.frame_positions(clip.video.pts, indices), strict=True):
        first.setdefault(position, k)
    kept = list(first.values())
    step = -(-len(kept) // MAX_FRAMES_PER_CLIP)
    return tuple(kept[:: max(1, step)])


def version_table(
    clips: Iterable[Sequence[CachedClip]],
    *,
    sources: Mapping[str, tuple[str, Mapping[str, Any]]],
    splits: Mapping[str, str],
    embeddings: Mapping[str, tuple[int, int]],
    scores: Mapping[str, Mapping[str, Any]],
    intervals: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
) -> pa.Table:
    """The rows of a version, by position. ``clips``: batches of them.

    Args:
        sources: (uri, metadata) by video key. splits: by video key.
        embeddings: (part, row id) by clip key. scores: by column, then by clip key.
        intervals: by video key, the metadata of each interval that a manifest asked for; a clip has its own interval's.
    """
    schema = pa.schema([*schemas.VERSION_HEAD, *schemas.POOLED_SCORES])
    tables, count = [schema.empty_table()], 0
    for batch in clips:
        rows = [_version_row(count + i, c, sources, splits, embeddings) for i, c in enumerate(batch)]
        tables.append(pa.Table.from_pylist(rows, schema=schema))
        count += len(rows)
    table = pa.concat_tables(tables).combine_chunks()
    keys, videos = table["clip_key"].to_pylist(), table["video_key"].to_pylist()
    for name, values in scores.items():
        column = pa.array([values.get(key) for key in keys])
        table = table.append_column(_free(name, table, "score"), column)
    segments = table["segment"].to_pylist()
    every = [m for _, m in sources.values()] + [m for each in intervals.values() for m in each]
    for name in sorted({k for metadata in every for k in metadata}):
        told = []
        for video, segment in zip(videos, segments, strict=True):
            own = intervals[video][segment] if segment >= 0 and video in intervals else {}
            told.append(own.get(name, sources[video][1].get(name)))
        table = table.append_column(_free(name, table, "meta"), _uniform(told))
    return table


def _version_row(
    position: int,
    clip: CachedClip,
    sources: Mapping[str, tuple[str, Mapping[str, Any]]],
    splits: Mapping[str, str],
    embeddings: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    row, key = clip.row, clip.row["clip_key"]
    names = {f.name for f in [*schemas.POSITION_OF_CLIP, *schemas.POOLED_SCORES]} | {
        "video_key",
        "stream",
        "shot",
        "segment",
    }
    embedding = embeddings.get(key)
    return {
        **{n: row[n] for n in names},
        "position": position,
        "uri": sources[row["video_key"]][0],
        "split": splits[row["video_key"]],
        "weight": 1.0,
        "bucket": 0,
        "width": clip.video.width,
        "height": clip.video.height,
        "cache_fps_num": clip.grid.rate.numerator,
        "cache_fps_den": clip.grid.rate.denominator,
        "first_grid": clip.indices.start,
        "grid_count": len(clip.indices),
        "frames": [r._asdict() for r in clip.refs],
        "embedding": {"part": embedding[0], "row_id": embedding[1]} if embedding else None,
    }


def _free(name: str, table: pa.Table, prefix: str) -> str:
    """A column name that is not taken."""
    while name in schemas.VERSION_RESERVED or name in table.column_names:
        name = f"{prefix}_{name}"
    return name


def _uniform(values: list[Any]) -> pa.Array:
    """A column of a user's values: of one scalar type that holds them all exactly, else text (JSON for lists and the
    like).
    """
    told = [v for v in values if v is not None]
    if not told:
        return pa.nulls(len(values), pa.string())
    kinds = {type(v) for v in told}
    is_one_scalar = len(kinds) <= 1 and kinds <= {str, bool, int, float}
    whole = [v for v in told if type(v) is int]
    exact = all(abs(v) <= EXACT_IN_FLOAT for v in whole) if float in kinds else all(v in INT64 for v in whole)
    if exact and (is_one_scalar or kinds <= {int, float}):
        return pa.array(values)
    return pa.array([None if v is None else _text(v) for v in values], pa.string())


def _text(value: Any) -> str:
    is_nested = isinstance(value, (list, dict))
    return json.dumps(value, ensure_ascii=False, default=str) if is_nested else str(value)
