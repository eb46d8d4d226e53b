"""Chosen clips: what a SourceStage (payload) decodes once more, and what stages on its product are keyed by.

Clips are chosen by an SQL condition on their columns and the scores of stages on cached frames, and by a count: then an
even sample, the first in the order of a hash of their keys, so that a larger count keeps the clips of a smaller one.
Units hold whole videos in the order of a hash of their keys, sized by an estimate of what their payload takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.dataset.payloads import payloads_of
from videoflow.dataset.placed import PlacedClips
from videoflow.errors import RecipeError
from videoflow.fingerprint import clip_item_key
from videoflow.keys import clip_order, digest
from videoflow.loader.payload import payload_ref
from videoflow.recipe import PROBE, BuiltStage
from videoflow.stage import ClipStage, SourceStage
from videoflow.store.reader import rows_of
from videoflow.store.states import DONE, NOWHERE
from videoflow.unit import ChosenClip, ClipItem, SourceItem

if TYPE_CHECKING:
    from videoflow.plan import Plan, StageItems

#: What a unit's rows take at least where the job is large enough (estimated; blocks are then above 64 MB for sure).
BLOCK_BYTES = 128 << 20
UNITS_PER_WORKER = 4
#: Choices, by the clips they were made among and by stage: a job asks several times, and the first time the scores that
#: a condition names are there.
_CHOSEN: WeakKeyDictionary[PlacedClips, dict[str, np.ndarray]] = WeakKeyDictionary()
#: Clips whose payload rows are looked up at once.
CLIPS_AT_ONCE = 2000
#: Of a row with an array, these are worth a column of a version.
ARRAY_SCORES = frozenset({"psnr", "ssim"})


def source_of(plan: Plan, built: BuiltStage) -> BuiltStage | None:
    """The SourceStage that a clip stage reads, None for one on the frame cache."""
    named = (plan.named(name) for name in built.stage.inputs)
    return next((b for b in named if b is not None and isinstance(b.stage, SourceStage)), None)


def keys_of(plan: Plan, built: BuiltStage, clips: PlacedClips) -> tuple[pa.Array, pa.Array] | None:
    """(item keys, input digests) by clip, null where there is no item; None for stages on the frame cache."""
    if isinstance(built.stage, SourceStage):
        inputs = _probe_digests(plan, built, clips)
    elif (source := source_of(plan, built)) is not None:
        items, states = plan.clip_items(source, clips), plan.states(source)
        made = np.where(states.is_state(DONE)[items.found], items.found, NOWHERE)
        inputs = states.taken(made, "output_digest").to_pylist()
    else:
        return None
    keys = [
        None if d is None else clip_item_key(key, d, built.fingerprint)
        for key, d in zip(clips.table["clip_key"].to_pylist(), inputs, strict=True)
    ]
    return pa.array(keys, pa.string()), pa.array(inputs, pa.string())


def _probe_digests(plan: Plan, built: BuiltStage, clips: PlacedClips) -> list[str | None]:
    """What a chosen clip is made from: the video's bytes and what its pass measured (pts, damage)."""
    probe = plan.named(PROBE)
    assert probe is not None
    measured = plan.states(probe).taken(plan.items(probe).found, "output_digest").to_pylist()
    by_video = {key: digest(key, d or "") for key, d in zip(plan.keys, measured, strict=True)}
    videos = clips.table["video_key"].to_pylist()
    return [by_video[v] if c else None for v, c in zip(videos, chosen(plan, built, clips).tolist(), strict=True)]


# -- the choice ------------------------------------------------------------------------------------------------------


def chosen(plan: Plan, built: BuiltStage, clips: PlacedClips) -> np.ndarray:
    """By clip: whether a SourceStage is to make it.

    Raises:
        RecipeError: its condition is no SQL on the clips' columns.
    """
    made = _CHOSEN.setdefault(clips, {})
    if built.key not in made:
        made[built.key] = _choice(plan, built, clips)
    return made[built.key]


def _choice(plan: Plan, built: BuiltStage, clips: PlacedClips) -> np.ndarray:
    stage = built.stage
    assert isinstance(stage, SourceStage)
    mask = np.ones(len(clips), bool)
    if not len(clips):
        return mask
    keys = clips.table["clip_key"]
    if stage.where is not None:
        met = _meets(built.key, stage.where, _described(plan, clips))
        mask &= np.asarray(pc.is_in(keys, value_set=met), bool)
    if stage.count is not None and int(mask.sum()) > stage.count:
        at = np.flatnonzero(mask)
        order = sorted(
            (clip_order(key), i) for key, i in zip(keys.take(pa.array(at)).to_pylist(), at.tolist(), strict=True)
        )
        mask[:] = False
        mask[[i for _, i in order[: stage.count]]] = True
    return mask


def check_choices(built: Sequence[BuiltStage]) -> None:
    """Ask every condition of an empty table, before anything is decoded for it.

    Raises:
        RecipeError: it is no SQL on the columns that there will be.
    """
    clips = next((b for b in built if b.name == "clips"), None)
    if clips is None:
        return
    fields = [f for f in clips.stage.schema() if not isinstance(f.type, pa.ExtensionType)]
    fields.append(pa.field("uri", pa.string()))
    for b in _scored(built):
        fields += [pa.field(f"{b.key}_{n}", b.stage.schema().field(n).type) for n in score_columns(b)]
    for b in built:
        if isinstance(b.stage, SourceStage) and b.stage.where is not None:
            _meets(b.key, b.stage.where, pa.schema(fields).empty_table())


def _scored(built: Sequence[BuiltStage]) -> list[BuiltStage]:
    """The stages whose scores a condition may ask for: those on cached frames, which run before any payload."""
    sources = {b.name for b in built if isinstance(b.stage, SourceStage)}
    on_frames = (b for b in built if isinstance(b.stage, ClipStage) and not sources & {*b.stage.inputs})
    return [b for b in on_frames if b.table != "embeddings"]


def _described(plan: Plan, clips: PlacedClips) -> pa.Table:
    """The clips with all their columns and their uri, and the scores of stages on cached frames as
    ``<key>_<column>``.
    """
    stage = plan.named("clips")
    assert stage is not None
    items = clips.table["item_key"].unique()
    table = rows_of(plan.root, plan.parts(stage), items, where="state = 'done'")
    uris = [plan.videos[key].uri for key in table["video_key"].to_pylist()]
    table = table.append_column("uri", pa.array(uris, pa.string()))
    for b in _scored(plan.built):
        found = plan.clip_items(b, clips).keys
        clip_of = dict(zip(found.to_pylist(), clips.table["clip_key"].to_pylist(), strict=True))
        names, schema = score_columns(b), b.stage.schema()
        rows = rows_of(plan.root, plan.parts(b), found, columns=names)
        if not len(rows):
            for name in names:
                table = table.append_column(f"{b.key}_{name}", pa.nulls(len(table), schema.field(name).type))
            continue
        of = [clip_of[k] for k in rows["item_key"].to_pylist()]
        at = pc.index_in(table["clip_key"], value_set=pa.array(of, pa.string()))
        for name in names:
            table = table.append_column(f"{b.key}_{name}", rows[name].combine_chunks().take(at.combine_chunks()))
    return table


def score_columns(built: BuiltStage) -> list[str]:
    """The single-valued columns of a clip stage's own; of a row with an array those that say how good it is."""
    head = {"item_key", "input_digest", "video_key", "stream", "clip_key"}
    names = [f.name for f in built.stage.schema() if f.name not in head and not pa.types.is_nested(f.type)]
    return [n for n in names if n in ARRAY_SCORES] if built.stage.column() else names


def _meets(stage: str, where: str, table: pa.Table) -> pa.Array:
    """Keys of the clips that meet a condition."""
    connection = duckdb.connect(
        ":memory:", config={"enable_external_access": "false", "autoinstall_known_extensions": "false"}
    )
    try:
        connection.register("clips", table)
        found: pa.Table = connection.sql(f"SELECT clip_key FROM clips WHERE ({where})").to_arrow_table()
    except duckdb.Error as e:
        told = " ".join(str(e).split())[:300]
        raise RecipeError(f"stages.{stage}.where: {told} (columns: {', '.join(table.column_names)})") from e
    finally:
        connection.close()
    return found["clip_key"].combine_chunks()


# -- work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceUnits:
    """Units of a SourceStage: ``videos`` of each; items are made when a worker asks. ``num_clips``: of all of them."""

    plan: Plan
    built: BuiltStage
    clips: PlacedClips
    items: StageItems
    videos: list[list[str]]
    num_clips: int

    def __len__(self) -> int:
        return len(self.videos)

    def __iter__(self) -> Iterator[tuple[SourceItem, ...]]:
        probe = self.plan.named(PROBE)
        assert probe is not None
        at, table = np.flatnonzero(self.items.missing), self.clips.table
        by_video: dict[str, list[int]] = {}
        for i, video in zip(at.tolist(), table["video_key"].take(pa.array(at)).to_pylist(), strict=True):
            by_video.setdefault(video, []).append(i)
        columns = ("clip_key", "t0_pts", "t1_pts")
        for videos in self.videos:
            made = []
            for video in videos:
                rows = pa.array(by_video[video])
                parts = [self.items.keys, self.items.inputs, *(table[c] for c in columns)]
                told = zip(*(part.take(rows).to_pylist() for part in parts), strict=True)
                item = self.plan.videos[video].decode_item
                made.append(SourceItem(item, self.plan.pass_key(probe, video), tuple(ChosenClip(*t) for t in told)))
            yield tuple(made)


def source_units(plan: Plan, built: BuiltStage, clips: PlacedClips, items: StageItems, workers: int) -> SourceUnits:
    """What is missing of a SourceStage, cut into units of whole videos."""
    sizes = estimated_bytes(plan, built, clips, items.missing)
    enough = min(BLOCK_BYTES, sum(sizes.values()) / (workers * UNITS_PER_WORKER))
    units: list[list[str]] = []
    held, weight = list[str](), 0.0
    for video in sorted(sizes, key=lambda key: digest("payload order", key)):
        held.append(video)
        weight += sizes[video]
        if weight >= enough:
            units.append(held)
            held, weight = [], 0.0
    if held:
        units.append(held)
    return SourceUnits(plan, built, clips, items, units, int(items.missing.sum()))


def seconds_by_video(clips: PlacedClips, which: np.ndarray) -> dict[str, float]:
    """Length of the clips at some positions (a mask), by video; where clips overlap it counts twice."""
    seconds: dict[str, float] = {}
    names = ("video_key", "t0_pts", "t1_pts", "tb_num", "tb_den")
    rows = zip(*(clips.table[n].filter(pa.array(which)).to_pylist() for n in names), strict=True)
    for video, t0, t1, num, den in rows:
        seconds[video] = seconds.get(video, 0.0) + (t1 - t0) * num / den
    return seconds


def estimated_bytes(plan: Plan, built: BuiltStage, clips: PlacedClips, which: np.ndarray) -> dict[str, float]:
    """About what a SourceStage's product of some clips takes, by video."""
    stage, probe = built.stage, plan.named(PROBE)
    assert isinstance(stage, SourceStage) and probe is not None
    seconds = seconds_by_video(clips, which)
    keys = pa.array([plan.pass_key(probe, video) for video in seconds], pa.string())
    columns = ("video_key", "upright_width", "upright_height", "fps")
    rows = rows_of(plan.root, plan.parts(probe), keys, columns=columns).to_pylist() if seconds else []
    rates = {r["video_key"]: stage.bytes_per_second(*(r[c] or 1 for c in columns[1:])) for r in rows}
    return {video: rates.get(video, 0.0) * s for video, s in seconds.items()}


def missing_on(
    plan: Plan, built: BuiltStage, source: BuiltStage, clips: PlacedClips, items: StageItems
) -> Iterator[ClipItem]:
    """The items of a clip stage on a payload that have no answer, as a worker needs them.

    Raises:
        RecipeError: the stage's rate does not divide the payload's.
    """
    fps: Fraction | None = built.stage.fps  # type: ignore[attr-defined]
    made = plan.clip_items(source, clips).keys
    for at in _batches(np.flatnonzero(items.missing)):
        rows = clips.table.take(at).to_pylist()
        sources = made.take(at).to_pylist()
        payloads = payloads_of(plan.root, plan.parts(source), sources)
        told = zip(rows, sources, items.keys.take(at).to_pylist(), items.inputs.take(at).to_pylist(), strict=True)
        for row, of, key, input_digest in told:
            found = payload_ref(row, payloads[of], fps)
            if found is None:
                rate = Fraction(payloads[of]["fps_num"], payloads[of]["fps_den"])
                raise RecipeError(f"stage {built.key!r}: its rate {fps} does not divide the payload's {rate} frames/s")
            ref, wanted = found
            most = built.stage.grid_frames  # type: ignore[attr-defined]
            yield ClipItem(key, input_digest, row["video_key"], row["stream"], ref, tuple(wanted)[:most])


def _batches(at: np.ndarray) -> Iterator[pa.Array]:
    for first in range(0, len(at), CLIPS_AT_ONCE):
        yield pa.array(at[first : first + CLIPS_AT_ONCE])


def payloads_to_come(plan: Plan, built: BuiltStage, clips: PlacedClips) -> int:
    """Videos with a chosen clip that a clip stage on a payload has to wait for."""
    source = source_of(plan, built)
    if source is None:
        return 0
    missing = plan.clip_items(source, clips).missing
    return len(clips.table["video_key"].filter(pa.array(missing)).unique())


def tables_read(plan: Plan, built: BuiltStage, *, frames: str) -> dict[str, tuple[str, ...]]:
    """Parts of the tables that a worker reads for a clip stage, by stage name."""
    source = source_of(plan, built)
    names: Sequence[str] = (PROBE,) if isinstance(built.stage, SourceStage) else (source.name if source else frames,)
    return {n: plan.parts(found) for n in names if (found := plan.named(n))}


def published(plan: Plan, clips: PlacedClips) -> tuple[BuiltStage, dict[str, dict[str, Any]]] | None:
    """The recipe's first SourceStage and what a version says of its product, by clip key; None if it has none."""
    built = next((b for b in plan.clip_stages if isinstance(b.stage, SourceStage)), None)
    if built is None:
        return None
    items = plan.clip_items(built, clips)
    found: dict[str, dict[str, Any]] = {}
    for at in _batches(np.flatnonzero(plan.has_state(built, items, DONE))):
        keys = items.keys.take(at).to_pylist()
        rows = payloads_of(plan.root, plan.parts(built), keys)
        for item, clip in zip(keys, clips.table["clip_key"].take(at).to_pylist(), strict=True):
            if item in rows:
                found[clip] = rows[item]
    return built, found
