"""Clips of a plan on the cache's grid, as columns: a million of them are counted, keyed and looked up without a Python
object each. Objects (`CachedClip`) are made in batches of videos, for those that are to be computed or published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.dataset.assemble import CachedClip, cached_videos, place_clip
from videoflow.errors import SystemFailure
from videoflow.store import schemas
from videoflow.store.layout import Root
from videoflow.store.reader import rows_of
from videoflow.timeline import Grid

#: Videos whose cached frames are looked up at once.
VIDEOS_AT_ONCE = 500
#: Products of times and rates below this are exact in 64 bits.
_SAFE = 1 << 62
_ORDER = [(name, "ascending") for name in ("video_key", "stream", "t0_pts", "t1_pts", "segment")]
#: What tells a clip and its place on the grid.
KEY_COLUMNS = (
    *("item_key", "clip_key", "video_key", "stream", "t0_pts", "t1_pts", "tb_num", "tb_den", "start_pts", "segment"),
)


class PlacedClips:
    """Clips that have a frame on the cache's grid, by video and time.

    Attributes:
        table: `KEY_COLUMNS` of each. rate: the cache's frames/s. without: how many more have no cached frame.
    """

    def __init__(self, root: Root, table: pa.Table, rate: Fraction, without: int) -> None:
        self._root = root
        self.table = table
        self.rate = rate
        self.without = without

    def __len__(self) -> int:
        return len(self.table)

    def runs(self, *columns: str) -> tuple[np.ndarray, np.ndarray]:
        """Neighbours that agree in some columns: the number of each clip's run, and where every run begins."""
        turns = np.zeros(len(self), bool)
        turns[:1] = True
        for name in columns:
            column = self.table[name].combine_chunks()
            values = np.asarray(column.indices if pa.types.is_dictionary(column.type) else column)
            turns[1:] |= values[1:] != values[:-1]
        return np.cumsum(turns) - 1, np.flatnonzero(turns)

    def cached(
        self, positions: np.ndarray, *, clips: Sequence[str], frames: Sequence[str], frame_keys: Callable[[str], str]
    ) -> Iterator[list[CachedClip]]:
        """The clips at ascending positions, whole videos at a time.

        Args:
            clips, frames: parts of the two tables. frame_keys: a video's item in the frame cache.

        Raises:
            SystemFailure: the frame cache lacks a video that the ledger says it has.
        """
        videos = np.asarray(self.table["video_key"].combine_chunks().dictionary_encode().indices)[positions]
        turns = np.flatnonzero(np.diff(videos, prepend=-1))  # where the next video's clips begin
        for at in range(0, len(turns), VIDEOS_AT_ONCE):
            stop = turns[at + VIDEOS_AT_ONCE] if at + VIDEOS_AT_ONCE < len(turns) else len(positions)
            some = positions[turns[at] : stop]
            yield self._objects(some, clips, frames, frame_keys)

    def _objects(
        self, positions: np.ndarray, clips: Sequence[str], frames: Sequence[str], frame_keys: Callable[[str], str]
    ) -> list[CachedClip]:
        some = self.table.take(pa.array(positions))
        table = rows_of(self._root, clips, some["item_key"].unique().to_pylist(), where="state = 'done'")
        rows = {(row["clip_key"], row["segment"]): row for row in table.to_pylist()}
        wanted = [frame_keys(video) for video in some["video_key"].unique().to_pylist()]
        videos = cached_videos(self._root, frames, wanted)
        found = []
        for key in zip(some["clip_key"].to_pylist(), some["segment"].to_pylist(), strict=True):
            row = rows[key]
            placed = place_clip(row, videos.get(row["video_key"]), self.rate)
            if placed is None:
                cache = frames[0].rpartition("/")[0]
                raise SystemFailure(
                    f"the frame cache has lost pictures of video {row['video_key']}; remove {cache} and run again to "
                    "have it made anew"
                )
            found.append(placed)
        return found


def placed_clips(
    root: Root, parts: Sequence[str], item_keys: pa.Array, *, rate: Fraction, cached: pa.Array
) -> PlacedClips:
    """The clips of some items of the clips table. ``cached``: keys of the videos that are in the frame cache."""
    if not len(item_keys):
        return no_clips(root, rate)
    table = _first_of_each(_ordered(rows_of(root, parts, item_keys, columns=KEY_COLUMNS, where="state = 'done'")))
    kept = _on_grid(table, rate) & np.asarray(pc.is_in(table["video_key"], value_set=cached), bool)
    if kept.all():
        return PlacedClips(root, table, rate, 0)
    return PlacedClips(root, table.filter(pa.array(kept)), rate, int((~kept).sum()))


def _ordered(table: pa.Table) -> pa.Table:
    """By video and time; nothing is copied that is in order already. Keys of videos, of which many clips have the same
    one, are held once each.
    """
    indices = pc.sort_indices(table, _ORDER)
    for name in ("item_key", "video_key"):
        column = table[name].combine_chunks().dictionary_encode()
        table = table.set_column(table.schema.get_field_index(name), name, column)
    at = np.asarray(indices)
    return table if (at == np.arange(len(at))).all() else table.take(indices)


def no_clips(root: Root, rate: Fraction = Fraction(1)) -> PlacedClips:
    """Clips of nothing."""
    return PlacedClips(root, pa.schema([schemas.CLIPS.field(n) for n in KEY_COLUMNS]).empty_table(), rate, 0)


def _first_of_each(table: pa.Table) -> pa.Table:
    """One interval asked for twice is one clip: that of the last row, in the place of the first."""
    codes = np.asarray(table["clip_key"].combine_chunks().dictionary_encode().indices)
    if not len(codes) or (codes[-1] == len(codes) - 1 and (np.diff(codes) == 1).all()):
        return table
    last = np.zeros(codes.max() + 1, np.int64)
    last[codes] = np.arange(len(codes))
    return table.take(pa.array(last))


def _on_grid(table: pa.Table, rate: Fraction) -> np.ndarray:
    """Whether some grid time lies in a clip (see `Grid.indices`), all at once where 64 bits are enough."""
    t0, t1, start, num, den = (
        np.asarray(table[name], np.int64) for name in ("t0_pts", "t1_pts", "start_pts", "tb_num", "tb_den")
    )
    found = np.zeros(len(table), bool)
    for a, b in sorted(set(zip(num.tolist(), den.tolist(), strict=True))):
        mine = np.flatnonzero((num == a) & (den == b))
        per_unit = Fraction(a, b) * rate
        first, stop = t0[mine] - start[mine], t1[mine] - start[mine]
        if max(int(np.abs(first).max()), int(np.abs(stop).max())) * per_unit.numerator < _SAFE:
            k0, k1 = (-((-x * per_unit.numerator) // per_unit.denominator) for x in (first, stop))
            found[mine] = np.maximum(k0, 0) < k1
        else:
            grid = Grid(0, Fraction(a, b), rate)
            found[mine] = [bool(grid.indices(x, y)) for x, y in zip(first.tolist(), stop.tolist(), strict=True)]
    return found
