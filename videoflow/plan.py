"""The plan: what a recipe would compute, reuse and skip. Reads the ledger, opens no video.

Items are keyed by content and by what computes them; an item without a ledger row is *missing*, a quarantined one is
not tried again. Downstream keys need the digests of what is upstream, so a stage whose input is still missing is only
counted by videos ("after decoding").

Everything is asked for all videos (or clips) at once: keys and answers are columns, in the order of ``Plan.keys``
(or of the clips); objects are made only for items that are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from videoflow.chosen import keys_of, missing_on, source_of
from videoflow.dataset.assemble import CachedClip, distinct_frames
from videoflow.dataset.placed import PlacedClips, placed_clips
from videoflow.errors import MOVED_UNDER_THE_JOB, RecipeError
from videoflow.fingerprint import clip_item_keys, pass_item_key, video_item_key
from videoflow.fitting import settled
from videoflow.keys import digest
from videoflow.recipe import PROBE, BuiltStage, Recipe
from videoflow.stage import ClipStage, PassConsumer, SourceStage, VideoStage
from videoflow.store.layout import Root, part_path
from videoflow.store.ledger import ItemResult, Ledger
from videoflow.store.states import NOWHERE, QUARANTINED, LedgerRow, States
from videoflow.store.writer import parts_of
from videoflow.timeline import divisor_step
from videoflow.unit import ClipItem, DecodeItem, RowsItem

FRAMES, CLIPS, AUDIO, SOUND = "frames", "clips", "audio", "sound"
#: Keys that are made as Python strings at once, before they become a column.
KEYS_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True)
class VideoSource:
    """One distinct content among a run's sources: its first uri and all that the sources say of it. ``metadata``: of
    the whole video; ``interval_metadata``: of each interval.
    """

    video_key: str
    path: str
    uri: str
    size: int
    stamp: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    intervals: tuple[tuple[Fraction, Fraction], ...] = ()
    interval_metadata: tuple[Mapping[str, Any], ...] = ()

    @property
    def told(self) -> list[Mapping[str, Any]]:
        """All that the sources say of each interval, or of the video where there is none; one that says nothing in a
        column has the video's word.
        """
        return [{**self.metadata, **m} for m in self.interval_metadata] if self.intervals else [self.metadata]

    @property
    def decode_item(self) -> DecodeItem:
        return DecodeItem(self.video_key, self.path, self.uri, self.size, self.stamp)


@dataclass(frozen=True)
class StageItems:
    """The items of one stage, as columns: of every video for a stage of videos, of every clip for a ClipStage.

    Attributes:
        keys: item keys, null where there is no item (an input is missing or quarantined). inputs: input digests.
        found: position of the answer among the stage's states, NOWHERE where there is none.
    """

    keys: pa.Array
    inputs: pa.Array
    found: np.ndarray

    @property
    def exists(self) -> np.ndarray:
        return np.asarray(self.keys.is_valid())

    @property
    def missing(self) -> np.ndarray:
        """Where there is an item without an answer."""
        return self.exists & (self.found == NOWHERE)


class Plan:
    """The state of a recipe over some videos, as the ledger has it. ``refresh`` reads the ledger again."""

    def __init__(
        self, root: Root, ledger: Ledger, recipe: Recipe, built: Sequence[BuiltStage], videos: Iterable[VideoSource]
    ) -> None:
        self.root = root
        self.recipe = recipe
        self.built = settled(root, built)
        self.videos = {v.video_key: v for v in videos}
        self.keys = tuple(self.videos)
        self.ledger = ledger
        self._states: dict[str, States] = {}
        self._pass_keys: dict[str, pa.Array] = {}
        self._items: dict[str, StageItems] = {}
        #: Answers that count for nothing, since somebody removed the table that their rows were in; by stage.
        self.lost: dict[str, list[LedgerRow]] = {}
        self.refresh()

    def refresh(self, *keys: str) -> None:
        some = [b for b in self.built if not keys or b.key in keys]
        for b in some:
            self._states.pop(b.key, None)  # the old answers make room first
        found = self.ledger.lean_states({(b.name, b.fingerprint) for b in some})
        for b in some:
            states = found[b.name, b.fingerprint]
            self._states[b.key], self.lost[b.key] = states, []
            if not self.parts(b):
                gone = states.has_rows()[:-1]
                self.lost[b.key] = self._rows(b, np.flatnonzero(gone))
                self._states[b.key] = states.without(gone)
        self._items.clear()

    def replace(self, built: BuiltStage) -> None:
        """Take another form of a stage, by its key in the recipe."""
        self.built = tuple(built if b.key == built.key else b for b in self.built)
        self.refresh(built.key)

    def _rows(self, built: BuiltStage, positions: np.ndarray) -> list[LedgerRow]:
        """Whole answers at some positions of a stage's states, which are few, in their order."""
        keys = self._states[built.key].taken(positions, "item_key").to_pylist()
        rows = self.answers(built, keys)
        return [rows[k] for k in keys if k in rows]

    def answers(self, built: BuiltStage, item_keys: Collection[str]) -> dict[str, LedgerRow]:
        """Whole answers of some items, of those that have one."""
        there = self._states[built.key].find(list(item_keys)) != NOWHERE
        wanted = {k for k, is_there in zip(item_keys, there.tolist(), strict=True) if is_there}
        return dict(self.ledger.states(built.name, built.fingerprint, among=wanted)) if wanted else {}

    def unread(self, built: BuiltStage) -> list[LedgerRow]:
        """Results of a pass whose source was moved under the job: nothing about the content they are keyed by."""
        states = self._states[built.key]
        if not isinstance(built.stage, (PassConsumer, SourceStage)):
            return []
        found = self.items(built).found if isinstance(built.stage, PassConsumer) else np.arange(len(states))
        bad = self._rows(built, found[states.is_state(QUARANTINED)[found]])
        return [r for r in bad if (r.message or "").startswith(MOVED_UNDER_THE_JOB)]

    # -- stages by kind ----------------------------------------------------------------------------------------------

    @property
    def consumers(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, PassConsumer)]

    @property
    def row_stages(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, VideoStage)]

    @property
    def clip_stages(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, (ClipStage, SourceStage))]

    def named(self, name: str) -> BuiltStage | None:
        """The first stage of this name."""
        return next((b for b in self.built if b.name == name), None)

    def parts(self, built: BuiltStage) -> tuple[str, ...]:
        """Paths of the parts of a stage's table; none if it was never written."""
        return tuple(
            part_path(built.table, built.fingerprint, n) for n in parts_of(self.root, built.table, built.fingerprint)
        )

    def states(self, built: BuiltStage) -> States:
        """All answers of a stage, of these videos and others."""
        return self._states[built.key]

    # -- items of videos ---------------------------------------------------------------------------------------------

    def items(self, built: BuiltStage) -> StageItems:
        """The items of a stage of videos, in the order of ``keys``."""
        if built.key not in self._items:
            is_pass = isinstance(built.stage, PassConsumer)
            self._items[built.key] = self._pass_items(built) if is_pass else self._rows_items(built)
        return self._items[built.key]

    def has_state(self, built: BuiltStage, items: StageItems, state: str) -> np.ndarray:
        """By item: whether its answer has this state."""
        return self._states[built.key].is_state(state)[items.found]

    def pass_key(self, built: BuiltStage, video_key: str) -> str:
        return pass_item_key(video_key, self.recipe.stream, built.fingerprint)

    def _pass_items(self, built: BuiltStage) -> StageItems:
        if built.key not in self._pass_keys:
            self._pass_keys[built.key] = _column(self.pass_key(built, key) for key in self.keys)
        keys = self._pass_keys[built.key]
        return StageItems(keys, pa.nulls(len(keys), pa.string()), self._states[built.key].find(keys))

    def _rows_items(self, built: BuiltStage) -> StageItems:
        """No item while an input is missing, or where one that is required is quarantined."""
        assert isinstance(built.stage, VideoStage)
        exists = np.ones(len(self.keys), bool) if built.stage.inputs else ~self.unusable()
        digests: list[tuple[str, list[str | None]]] = []
        for name, source in self._inputs(built):
            items, states = self.items(source), self._states[source.key]
            bad = states.is_state(QUARANTINED)[items.found]
            exists &= items.found != NOWHERE
            if name in built.stage.required_inputs():
                exists &= ~bad
            usable = np.where(bad, NOWHERE, items.found)
            digests.append((name, states.taken(usable, "output_digest").to_pylist()))
        digests.sort()
        told = [built.stage.told(v.told, v.uri) for v in self.videos.values()]
        inputs = _column(
            digest([[n, d[i]] for n, d in digests if d[i] is not None], *told[i]) if there else None
            for i, there in enumerate(exists.tolist())
        )
        keys = _column(
            None if d is None else video_item_key(v.video_key, d, v.intervals, built.fingerprint)
            for v, d in zip(self.videos.values(), _values(inputs), strict=True)
        )
        return StageItems(keys, inputs, self._states[built.key].find(keys))

    def _inputs(self, built: BuiltStage) -> list[tuple[str, BuiltStage]]:
        return [(name, source) for name in built.stage.inputs if (source := self.named(name)) is not None]

    def rows_items(self, built: BuiltStage, which: np.ndarray) -> list[RowsItem]:
        """Items of a VideoStage at some videos (a mask)."""
        assert isinstance(built.stage, VideoStage)
        items = self.items(built)
        at = np.flatnonzero(which & items.exists)
        columns = []
        for name, source in self._inputs(built):
            ins = self.items(source)
            usable = ~self.has_state(source, ins, QUARANTINED)[at]
            columns.append((name, ins.keys.take(pa.array(at)).to_pylist(), usable.tolist()))
        found = []
        keys, inputs = (c.take(pa.array(at)).to_pylist() for c in (items.keys, items.inputs))
        for i, video in enumerate(at.tolist()):
            read = {name: values[i] for name, values, usable in columns if usable[i]}
            v = self.videos[self.keys[video]]
            said = built.stage.told(v.told, v.uri)
            found.append(RowsItem(keys[i], inputs[i], v.video_key, read, v.intervals, said))
        return found

    # -- the decode pass ---------------------------------------------------------------------------------------------

    def unusable(self) -> np.ndarray:
        """By video: whether the probe quarantined it, so that no other product is tried."""
        probe = self.named(PROBE)
        return self.has_state(probe, self.items(probe), QUARANTINED) if probe else np.zeros(len(self.keys), bool)

    def unaccounted(self) -> list[tuple[BuiltStage, ItemResult]]:
        """Results that follow from a quarantined probe for consumers that have none: same class and message.

        A pass writes them itself; they are missing where it was killed in between, and for new parameters.
        """
        probe = self.named(PROBE)
        at = np.flatnonzero(self.unusable())
        if probe is None or not len(at):
            return []
        why = self._rows(probe, self.items(probe).found[at])
        found: list[tuple[BuiltStage, ItemResult]] = []
        for b in self.consumers:
            missing = self.items(b).missing
            for i, row in zip(at.tolist(), why, strict=True):
                if missing[i]:
                    key = self.keys[i]
                    item = self.pass_key(b, key)
                    result = ItemResult(item, key, key, state=QUARANTINED, reason=row.reason, message=row.message)
                    found.append((b, result))
        return found

    def missing_products(self) -> dict[tuple[str, ...], list[VideoSource]]:
        """Videos to decode, by the keys of the consumers that still lack a result."""
        lacking = np.array([self.items(b).missing for b in self.consumers]) & ~self.unusable()
        groups: dict[tuple[str, ...], list[VideoSource]] = {}
        for i in np.flatnonzero(lacking.any(axis=0)).tolist():
            names = tuple(b.key for b, lacks in zip(self.consumers, lacking[:, i], strict=True) if lacks)
            groups.setdefault(names, []).append(self.videos[self.keys[i]])
        return groups

    # -- clips -------------------------------------------------------------------------------------------------------

    def clips(self) -> PlacedClips:
        """All clips of these videos on the cache's grid."""
        clips, frames = self.named(CLIPS), self.named(FRAMES)
        if clips is None or frames is None:
            raise RecipeError("a version needs the stages frames and clips in the recipe")
        items, cache = self.items(clips), self.items(frames)
        keys = items.keys.filter(pa.array(items.found != NOWHERE))
        cached = pa.array(self.keys, pa.string()).filter(pa.array(self._states[frames.key].has_rows()[cache.found]))
        rate = Fraction(frames.stage.params.fps)
        return placed_clips(self.root, self.parts(clips), keys, rate=rate, cached=cached)

    def clip_step(self, built: BuiltStage, rate: Fraction) -> int:
        """How many steps of the cache's grid one of a ClipStage is.

        Raises:
            RecipeError: its rate does not divide the cache's.
        """
        assert isinstance(built.stage, ClipStage)
        step = divisor_step(rate, built.stage.fps or rate)
        if step is None:
            raise RecipeError(
                f"stage {built.key!r}: its rate {built.stage.fps} does not divide the cache's {rate} frames/s"
            )
        return step

    def clip_items(self, built: BuiltStage, clips: PlacedClips) -> StageItems:
        """The items of a ClipStage or SourceStage, by position among the clips.

        Raises:
            RecipeError: its rate does not divide the cache's, or it chooses clips by what is no condition.
        """
        if (pair := keys_of(self, built, clips)) is not None:
            return StageItems(*pair, self._states[built.key].find(pair[0]))
        self.clip_step(built, clips.rate)
        frames = self.named(FRAMES)
        assert frames is not None
        cache = self._states[frames.key].taken(self.items(frames).found, "output_digest")
        outputs = dict(zip(self.keys, cache.to_pylist(), strict=True))
        rate = str(clips.rate)
        groups, firsts = clips.runs("video_key", "start_pts")
        places = clips.table.select(["video_key", "start_pts"]).take(pa.array(firsts))
        sources = [
            digest(outputs[video] or "", start, rate)
            for video, start in zip(*(c.to_pylist() for c in places.columns), strict=True)
        ]
        of = (sources[n] for n in _values(pa.array(groups)))
        column = _column(clip_item_keys(zip(_values(clips.table["clip_key"]), of, strict=True), built.fingerprint))
        inputs = pa.DictionaryArray.from_arrays(pa.array(groups, pa.int32()), pa.array(sources, pa.string()))
        return StageItems(column, inputs, self._states[built.key].find(column))

    def clip_objects(self, clips: PlacedClips, which: np.ndarray) -> Iterator[list[CachedClip]]:
        """The clips at some positions (a mask), in batches."""
        stage, cache, at = self.named(CLIPS), self.named(FRAMES), np.flatnonzero(which)
        assert stage is not None and cache is not None
        if len(at):
            yield from clips.cached(
                at,
                clips=self.parts(stage),
                frames=self.parts(cache),
                frame_keys=partial(self.pass_key, cache),
            )

    def missing_clips(self, built: BuiltStage, clips: PlacedClips, items: StageItems) -> Iterator[ClipItem]:
        """The items of a ClipStage that have no answer, as a worker needs them, made as they are asked for."""
        if (source_stage := source_of(self, built)) is not None:
            yield from missing_on(self, built, source_stage, clips, items)
            return
        assert isinstance(built.stage, ClipStage)
        step, most = self.clip_step(built, clips.rate), built.stage.grid_frames
        at = pa.array(np.flatnonzero(items.missing))
        keys = zip(_values(items.keys.take(at)), _values(items.inputs.take(at)), strict=True)
        for batch in self.clip_objects(clips, items.missing):
            for c in batch:
                key, source = next(keys)
                grid = c.indices[::step]
                wanted = distinct_frames(c, grid) if most is None else tuple(grid[:most])
                yield ClipItem(key, source, c.row["video_key"], c.row["stream"], c.ref, wanted)


def _column(values: Iterable[str | None]) -> pa.Array:
    """Strings as a column, without ever holding all of them as objects."""
    chunks, some = [], list[str | None]()
    for value in values:
        some.append(value)
        if len(some) == KEYS_AT_ONCE:
            chunks.append(pa.array(some, pa.string()))
            some.clear()
    chunks.append(pa.array(some, pa.string()))
    return pa.concat_arrays(chunks)


def _values(column: pa.Array) -> Iterator[Any]:
    """A column's values as objects, some at a time."""
    for at in range(0, len(column), KEYS_AT_ONCE):
        yield from column.slice(at, KEYS_AT_ONCE).to_pylist()
