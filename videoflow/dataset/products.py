"""What stages made of clips and of their videos' metadata, as columns of a version: references to rows (embeddings,
tokens, latents, outputs of text encoders) and scalar values by clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from videoflow.chosen import score_columns
from videoflow.dataset.placed import PlacedClips
from videoflow.plan import Plan
from videoflow.recipe import BuiltStage
from videoflow.stage import SourceStage, VideoStage
from videoflow.store import schemas
from videoflow.store.reader import PART, ROW_ID, rows_of

#: Rows of a stage that are Python objects at once.
ROWS_AT_ONCE = 10_000
EMBEDDINGS = "embeddings"


@dataclass
class Products:
    """Columns by clip key.

    Attributes:
        embeddings: (part, row id). scores: values by column, then by clip key.
        arrays: references (see `schemas.ARRAY_REF`) by column, then by clip key.
        tables: paths of the parts that references number, by the name that the version's manifest gives them.
    """

    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)


def clip_products(plan: Plan, clips: PlacedClips) -> Products:
    """What the plan's stages made of its clips."""
    found = Products()
    for b in (b for b in plan.clip_stages if not isinstance(b.stage, SourceStage)):
        if b.stage.column():
            _add_array(found, plan, b, clips)
        elif b.table == EMBEDDINGS and EMBEDDINGS not in found.tables:
            found.tables[EMBEDDINGS] = list(plan.parts(b))
            for key, row in _rows(plan, b, _clip_keys(plan, b, clips), []):
                found.embeddings[key] = (row[PART], row[ROW_ID])
        elif b.table != EMBEDDINGS:
            _add_scores(found, plan, b, clips)
    for b in plan.row_stages:
        if b.stage.column():
            _add_array(found, plan, b, clips)
    return found


def _add_array(found: Products, plan: Plan, b: BuiltStage, clips: PlacedClips) -> None:
    name = b.stage.column()
    assert name is not None
    name = b.key if name in found.arrays else name  # a second tokenizer goes by its key in the recipe
    refs = found.arrays.setdefault(name, {})
    if isinstance(b.stage, VideoStage):
        refs.update(_video_arrays(plan, b, clips))
    else:
        refs.update((key, _ref(row)) for key, row in _rows(plan, b, _clip_keys(plan, b, clips), ["shape"]))
        _add_scores(found, plan, b, clips)
    found.tables[name] = list(plan.parts(b))


def _ref(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"part": row[PART], "row_id": row[ROW_ID], "shape": row["shape"]}


def _video_arrays(plan: Plan, b: BuiltStage, clips: PlacedClips) -> dict[str, dict[str, Any]]:
    """By clip key, the array of the clip's own interval, or that of its whole video."""
    assert isinstance(b.stage, VideoStage)
    columns = ["shape", "segments"] if b.stage.by_interval else ["shape"]
    by_place: dict[tuple[str, int | None], dict[str, Any]] = {}
    for video, row in _rows(plan, b, _video_keys(plan, b), columns):
        segments = row.get("segments")
        by_place |= dict.fromkeys([(video, n) for n in ([None] if segments is None else segments)], _ref(row))
    table = clips.table.select(["clip_key", "video_key", "segment"])
    places = zip(*(c.to_pylist() for c in table.columns), strict=True)
    found = {clip: by_place.get((video, n)) or by_place.get((video, None)) for clip, video, n in places}
    return {clip: ref for clip, ref in found.items() if ref is not None}


def _add_scores(found: Products, plan: Plan, b: BuiltStage, clips: PlacedClips) -> None:
    names = score_columns(b)
    for key, row in _rows(plan, b, _clip_keys(plan, b, clips), names):
        for name in names:
            found.scores.setdefault(f"{b.key}_{name}", {})[key] = row[name]


def _clip_keys(plan: Plan, b: BuiltStage, clips: PlacedClips) -> dict[str, str]:
    """Clip keys by item key; a clip without a payload has no item of a stage on it."""
    pairs = zip(plan.clip_items(b, clips).keys.to_pylist(), clips.table["clip_key"].to_pylist(), strict=True)
    return {item: clip for item, clip in pairs if item is not None}


def _video_keys(plan: Plan, b: BuiltStage) -> dict[str, str]:
    """Video keys by item key."""
    pairs = zip(plan.items(b).keys.to_pylist(), plan.keys, strict=True)
    return {item: video for item, video in pairs if item is not None}


def _rows(
    plan: Plan, b: BuiltStage, keys: Mapping[str, str], columns: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, row) of a stage's rows for some items; ``keys``: by item key."""
    if not keys:
        return
    table = rows_of(plan.root, plan.parts(b), keys, columns=columns, with_row_ids=True)
    for row in (row for batch in table.to_batches(ROWS_AT_ONCE) for row in batch.to_pylist()):
        yield keys[row["item_key"]], row


def with_arrays(table: pa.Table, arrays: Mapping[str, Mapping[str, dict[str, Any]]]) -> pa.Table:
    """A version's rows with columns of references to arrays, null where a clip has none."""
    keys = table["clip_key"].to_pylist()
    for name, refs in arrays.items():
        table = table.append_column(name, pa.array([refs.get(key) for key in keys], schemas.ARRAY_REF))
    return table
