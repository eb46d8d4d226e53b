"""The plan: what a recipe would compute, reuse and skip. Reads the ledger, opens no video.

Items are keyed by content and by what computes them; an item without a ledger row is *missing*, a quarantined one is
not tried again. Downstream keys need the digests of what is upstream, so a stage whose input is still missing is only
counted by videos ("after decoding").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from videoflow.dataset.assemble import CachedClip, cached_videos, clip_rows, place_clip
from videoflow.errors import RecipeError
from videoflow.fingerprint import clip_item_key, pass_item_key, video_item_key
from videoflow.keys import digest
from videoflow.recipe import PROBE, BuiltStage, Recipe
from videoflow.stage import ClipStage, PassConsumer, VideoStage
from videoflow.store.layout import Root, part_path
from videoflow.store.ledger import FILTERED, QUARANTINED, Ledger, LedgerRow
from videoflow.store.writer import parts_of
from videoflow.timeline import divisor_step
from videoflow.unit import ClipItem, DecodeItem, RowsItem

FRAMES, CLIPS = "frames", "clips"


@dataclass(frozen=True)
class VideoSource:
    """One distinct content among a run's sources: its first uri and all that the sources say of it."""

    video_key: str
    path: str
    uri: str
    size: int
    stamp: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    intervals: tuple[tuple[Fraction, Fraction], ...] = ()

    @property
    def decode_item(self) -> DecodeItem:
        return DecodeItem(self.video_key, self.path, self.uri, self.size, self.stamp)


class Plan:
    """The state of a recipe over some videos, as the ledger has it. ``refresh`` reads the ledger again."""

    def __init__(
        self, root: Root, ledger: Ledger, recipe: Recipe, built: Sequence[BuiltStage], videos: Iterable[VideoSource]
    ) -> None:
        self.root = root
        self.recipe = recipe
        self.built = tuple(built)
        self.videos = {v.video_key: v for v in videos}
        self.ledger = ledger
        self._states: dict[str, dict[str, LedgerRow]] = {}
        self.refresh()

    def refresh(self, *keys: str) -> None:
        for b in self.built:
            if not keys or b.key in keys:
                self._states[b.key] = self.ledger.states(b.name, b.fingerprint)

    # -- stages by kind ----------------------------------------------------------------------------------------------

    @property
    def consumers(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, PassConsumer)]

    @property
    def row_stages(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, VideoStage)]

    @property
    def clip_stages(self) -> list[BuiltStage]:
        return [b for b in self.built if isinstance(b.stage, ClipStage)]

    def named(self, name: str) -> BuiltStage | None:
        """The first stage of this name."""
        return next((b for b in self.built if b.name == name), None)

    def parts(self, built: BuiltStage) -> tuple[str, ...]:
        """Paths of the parts of a stage's table; none if it was never written."""
        return tuple(
            part_path(built.table, built.fingerprint, n) for n in parts_of(self.root, built.table, built.fingerprint)
        )

    def state(self, built: BuiltStage, item_key: str) -> LedgerRow | None:
        return self._states[built.key].get(item_key)

    # -- the decode pass ---------------------------------------------------------------------------------------------

    def pass_key(self, built: BuiltStage, video_key: str) -> str:
        return pass_item_key(video_key, self.recipe.stream, built.fingerprint)

    def is_unusable(self, video_key: str) -> bool:
        """True if the probe quarantined it: no other product is tried."""
        probe = self.named(PROBE)
        row = self.state(probe, self.pass_key(probe, video_key)) if probe else None
        return row is not None and row.state == QUARANTINED

    def missing_products(self) -> dict[tuple[str, ...], list[VideoSource]]:
        """Videos to decode, by the keys of the consumers that still lack a result."""
        groups: dict[tuple[str, ...], list[VideoSource]] = {}
        for key, video in self.videos.items():
            if self.is_unusable(key):
                continue
            lacking = tuple(b.key for b in self.consumers if self.state(b, self.pass_key(b, key)) is None)
            if lacking:
                groups.setdefault(lacking, []).append(video)
        return groups

    # -- rows of other stages ----------------------------------------------------------------------------------------

    def rows_item(self, built: BuiltStage, video_key: str) -> RowsItem | None:
        """The item of a VideoStage for one video; None while an input is missing or where one is quarantined."""
        inputs: dict[str, str] = {}
        digests: dict[str, str] = {}
        for name in built.stage.inputs:
            source = self.named(name)
            if source is None:
                continue
            key = self._input_key(source, video_key)
            row = self.state(source, key) if key else None
            if row is None or row.state == QUARANTINED:
                if name in built.stage.required_inputs() or row is None:
                    return None
                continue
            inputs[name] = row.item_key
            digests[name] = row.output_digest
        input_digest = digest(sorted(digests.items()))
        intervals = self.videos[video_key].intervals
        item_key = video_item_key(video_key, input_digest, intervals, built.fingerprint)
        return RowsItem(item_key, input_digest, video_key, inputs, intervals)

    def _input_key(self, source: BuiltStage, video_key: str) -> str | None:
        if isinstance(source.stage, PassConsumer):
            return self.pass_key(source, video_key)
        item = self.rows_item(source, video_key)
        return item.item_key if item else None

    def rows_items(self, built: BuiltStage) -> list[RowsItem]:
        items = (self.rows_item(built, key) for key in self.videos)
        return [i for i in items if i is not None]

    # -- clips -------------------------------------------------------------------------------------------------------

    def clips(self) -> tuple[list[CachedClip], int]:
        """All clips of these videos on the cache's grid, and how many have no cached frame."""
        clips, frames = self.named(CLIPS), self.named(FRAMES)
        if clips is None or frames is None:
            raise RecipeError("a version needs the stages frames and clips in the recipe")
        keys = {i.item_key for i in self.rows_items(clips) if self.state(clips, i.item_key)}
        rows = clip_rows(self.root, self.parts(clips), keys) if keys else []
        frame_keys = {self.pass_key(frames, r["video_key"]) for r in rows}
        videos = cached_videos(self.root, self.parts(frames), frame_keys) if frame_keys else {}
        rate = Fraction(frames.stage.params.fps)
        unique = {r["clip_key"]: r for r in rows}.values()  # one interval asked for twice is one clip
        placed = [place_clip(r, videos.get(r["video_key"]), rate) for r in unique]
        found = [c for c in placed if c is not None]
        return found, len(placed) - len(found)

    def clip_items(self, built: BuiltStage, clips: Sequence[CachedClip]) -> list[ClipItem]:
        """The items of a ClipStage over placed clips.

        Raises:
            RecipeError: its rate does not divide the cache's.
        """
        frames = self.named(FRAMES)
        assert frames is not None and isinstance(built.stage, ClipStage)
        rate = Fraction(frames.stage.params.fps)
        step = divisor_step(rate, built.stage.fps or rate)
        if step is None:
            raise RecipeError(
                f"stage {built.key!r}: its rate {built.stage.fps} does not divide the cache's {rate} frames/s"
            )
        items = []
        for c in clips:
            state = self.state(frames, self.pass_key(frames, c.row["video_key"]))
            source = digest(state.output_digest if state else "", c.grid.start_pts, str(rate))
            key = clip_item_key(c.row["clip_key"], source, built.fingerprint)
            items.append(ClipItem(key, source, c.row["video_key"], c.row["stream"], c.ref, tuple(c.indices[::step])))
        return items

    # -- how videos ended --------------------------------------------------------------------------------------------

    def video_states(self, clips: Sequence[CachedClip]) -> Counter[str]:
        """done | filtered | quarantined | pending, by video. A video is done when every stage of it and its clips
        ended.
        """
        by_video: dict[str, set[str]] = {key: set() for key in self.videos}
        for key in self.videos:
            if self.is_unusable(key):
                by_video[key].add(QUARANTINED)
                continue
            rows = [self.state(b, self.pass_key(b, key)) for b in self.consumers]
            for built in self.row_stages:
                item = self.rows_item(built, key)
                has_bad_input = item is None and any(r is not None and r.state == QUARANTINED for r in rows)
                if not has_bad_input:
                    rows.append(self.state(built, item.item_key) if item else None)
            by_video[key] |= {row.state if row else "pending" for row in rows}
        for built in self.clip_stages:
            for clip_item in self.clip_items(built, clips):
                row = self.state(built, clip_item.item_key)
                # A filtered clip does not filter its video.
                by_video[clip_item.video_key].add(
                    "pending" if row is None else "done" if row.state == FILTERED else row.state
                )
        counts: Counter[str] = Counter()
        for states in by_video.values():
            counts[next(s for s in ("pending", QUARANTINED, FILTERED, "done") if s in states)] += 1
        return counts


@dataclass(frozen=True)
class StageForecast:
    """What `videoflow plan` says of one stage. ``unknown``: videos whose items show only after decoding."""

    stage: str
    fingerprint: str
    grain: str  # video | clip
    cached: int
    to_compute: int
    quarantined: int
    unknown: int


def forecast(plan: Plan) -> list[StageForecast]:
    """Per stage: cached, to compute, quarantined, and what cannot be known before upstream stages have run."""
    result = []
    usable = [k for k in plan.videos if not plan.is_unusable(k)]
    bad = len(plan.videos) - len(usable)
    for b in plan.consumers:
        rows = [plan.state(b, plan.pass_key(b, k)) for k in usable]
        broken = sum(r is not None and r.state == QUARANTINED for r in rows)
        missing = sum(r is None for r in rows)
        result.append(
            StageForecast(b.key, b.fingerprint, "video", len(rows) - missing - broken, missing, bad + broken, 0)
        )
    for b in plan.row_stages:
        items = [plan.rows_item(b, k) for k in usable]
        states = [plan.state(b, i.item_key) for i in items if i]
        broken = sum(s is not None and s.state == QUARANTINED for s in states)
        missing = sum(s is None for s in states)
        unknown = len(items) - len(states)
        result.append(
            StageForecast(b.key, b.fingerprint, "video", len(states) - missing - broken, missing, bad + broken, unknown)
        )
    clips = plan.clips()[0] if plan.named(CLIPS) and plan.named(FRAMES) and plan.clip_stages else []
    clips_stage = plan.named(CLIPS)
    for b in plan.clip_stages:
        states = [plan.state(b, i.item_key) for i in plan.clip_items(b, clips)]
        broken = sum(s is not None and s.state == QUARANTINED for s in states)
        missing = sum(s is None for s in states)
        waiting = sum(1 for k in usable if clips_stage and not _ended(plan, clips_stage, k))
        result.append(
            StageForecast(b.key, b.fingerprint, "clip", len(states) - missing - broken, missing, broken, waiting)
        )
    return result


def _ended(plan: Plan, built: BuiltStage, video_key: str) -> bool:
    item = plan.rows_item(built, video_key)
    return item is not None and plan.state(built, item.item_key) is not None
