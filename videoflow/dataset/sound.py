"""Sound in a version: where the samples of every clip lie in the audio cache, as columns of their own.

Samples of a video are numbered from its first shown pts on, at the audio cache's rate; a clip's row holds the runs that
share a sample with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa

from videoflow.store import schemas
from videoflow.store.layout import Root
from videoflow.store.reader import PART, ROW_ID, rows_of

#: Videos whose runs are looked up at once.
VIDEOS_AT_ONCE = 500
_ROW_COLUMNS = ("item_key", "video_key", "first_samples", "counts", "offsets")
_CLIP_COLUMNS = ("video_key", "t0_pts", "t1_pts", "tb_num", "tb_den", "start_pts")


def sample_span(clip: Mapping[str, Any], rate: int) -> tuple[int, int]:
    """Numbers of the samples, [first, last), that a clip's row may need: none before t0 is left out, none begins at t1.

    Args:
        clip: its ``t0_pts``, ``t1_pts``, ``tb_num``, ``tb_den`` and ``start_pts``.
    """
    per_pts = Fraction(clip["tb_num"], clip["tb_den"]) * rate
    first, last = ((clip[name] - clip["start_pts"]) * per_pts for name in ("t0_pts", "t1_pts"))
    return math.floor(first), math.ceil(last)


def with_audio(
    table: pa.Table, root: Root, parts: Sequence[str], item_keys: Mapping[str, str], *, rate: int, channels: int
) -> pa.Table:
    """A version's rows with the columns ``audio``, ``audio_rate`` and ``audio_channels``.

    Args:
        parts: of the audio table. item_keys: a video's item in it, by video key.
    """
    clips = table.select(_CLIP_COLUMNS).to_pylist()
    found: list[list[dict[str, int]]] = []
    for first, stop in _turns([clip["video_key"] for clip in clips]):
        some = clips[first:stop]
        wanted = [item_keys[key] for key in dict.fromkeys(clip["video_key"] for clip in some) if key in item_keys]
        runs = _runs_of(root, parts, wanted)
        found += [_refs(runs.get(clip["video_key"], []), *sample_span(clip, rate)) for clip in some]
    columns = {
        "audio": pa.array(found, pa.list_(schemas.SOUND_REF)),
        "audio_rate": pa.array([rate] * len(table), pa.int32()),
        "audio_channels": pa.array([channels] * len(table), pa.int32()),
    }
    for name in schemas.VERSION_AUDIO:
        table = table.append_column(name, columns[name.name])
    return table


def _turns(videos: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold at most VIDEOS_AT_ONCE videos each; a video's rows lie side by side."""
    first, seen = 0, set[str]()
    for i, key in enumerate(videos):
        if key not in seen and len(seen) == VIDEOS_AT_ONCE:
            yield first, i
            first, seen = i, set()
        seen.add(key)
    if len(videos) > first:
        yield first, len(videos)


def _runs_of(root: Root, parts: Sequence[str], item_keys: Sequence[str]) -> dict[str, list[dict[str, int]]]:
    """Every run of some videos as a reference, by video key, in order."""
    table = rows_of(root, parts, item_keys, columns=_ROW_COLUMNS, with_row_ids=True)
    found: dict[str, list[dict[str, int]]] = {}
    for row in table.to_pylist():
        offsets = row["offsets"]
        for i, (first, count) in enumerate(zip(row["first_samples"], row["counts"], strict=True)):
            place = {"part": row[PART], "row_id": row[ROW_ID], "offset": offsets[i]}
            run = {**place, "length": offsets[i + 1] - offsets[i], "first": first, "count": count}
            found.setdefault(row["video_key"], []).append(run)
    for runs in found.values():
        runs.sort(key=lambda run: run["first"])
    return found


def _refs(runs: Sequence[dict[str, int]], first: int, last: int) -> list[dict[str, int]]:
    """The runs that share a sample with [first, last); they do not overlap each other."""
    at = max(0, bisect_right(runs, first, key=lambda run: run["first"]) - 1)
    near = runs[at : bisect_right(runs, last - 1, key=lambda run: run["first"])]
    return [run for run in near if run["first"] < last and run["first"] + run["count"] > first]
