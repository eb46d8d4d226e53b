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

from videoflow.dataset.assemble import CachedClip, cached_videos, clip_rows, distinct_frames, place_clip
from videoflow.errors import MOVED_UNDER_THE_JOB, RecipeError
from videoflow.fingerprint import clip_item_key, pass_item_key, video_item_key
from videoflow.history import StageHistory, Wanted
from videoflow.keys import digest
from videoflow.recipe import PROBE, BuiltStage, Recipe
from videoflow.stage import ClipStage, PassConsumer, VideoStage
from videoflow.store.layout import Root, part_path
from videoflow.store.ledger import FILTERED, QUARANTINED, ItemResult, Ledger, LedgerRow
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
        #: Answers that count for nothing, since somebody removed the table that their rows were in; by stage.
        self.lost: dict[str, list[LedgerRow]] = {}
        self.refresh()

    def refresh(self, *keys: str) -> None:
        for b in self.built:
            if not keys or b.key in keys:
                states = self.ledger.states(b.name, b.fingerprint)
                self.lost[b.key] = [] if self.parts(b) else [r for r in states.values() if r.rows]
                for row in self.lost[b.key]:
                    del states[row.item_key]
                self._states[b.key] = states

    def unread(self, built: BuiltStage) -> list[LedgerRow]:
        """Results of a pass whose source was moved under the job: nothing about the content they are keyed by."""
        if not isinstance(built.stage, PassConsumer):
            return []
        rows = (self.state(built, self.pass_key(built, key)) for key in self.videos)
        bad = [r for r in rows if r is not None and r.state == QUARANTINED]
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

    def unaccounted(self) -> list[tuple[BuiltStage, ItemResult]]:
        """Results that follow from a quarantined probe for consumers that have none: same class and message.

        A pass writes them itself; they are missing where it was killed in between, and for new parameters.
        """
        probe = self.named(PROBE)
        found: list[tuple[BuiltStage, ItemResult]] = []
        for key in self.videos if probe else ():
            assert probe is not None
            if not self.is_unusable(key):
                continue
            why = self.state(probe, self.pass_key(probe, key))
            assert why is not None
            for b in self.consumers:
                item = self.pass_key(b, key)
                if self.state(b, item) is None:
                    result = ItemResult(item, key, key, state=QUARANTINED, reason=why.reason, message=why.message)
                    found.append((b, result))
        return found

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
        parts = self.parts(frames) if frame_keys else ()  # none yet: the clips are there, another rate's frames not
        videos = cached_videos(self.root, parts, frame_keys) if parts else {}
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
            wanted = distinct_frames(c, c.indices[::step])
            items.append(ClipItem(key, source, c.row["video_key"], c.row["stream"], c.ref, wanted))
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
    """What `videoflow plan` says of one stage.

    Attributes:
        to_compute: items without a result; stale: of these, items that have one under another fingerprint or from
        another input. changed: the components that differ (see `videoflow.history`).
        unknown: videos whose items show only after decoding.
    """

    stage: str
    fingerprint: str
    grain: str  # video | clip
    cached: int
    to_compute: int
    quarantined: int
    unknown: int
    stale: int = 0
    changed: tuple[str, ...] = ()


def forecast(plan: Plan) -> list[StageForecast]:
    """Per stage: cached, to compute, stale, quarantined, and what cannot be known before upstream stages have run."""
    result = []
    usable = [k for k in plan.videos if not plan.is_unusable(k)]
    bad = len(plan.videos) - len(usable)
    for b in plan.consumers:
        wanted = [Wanted.of_pass(k, plan.recipe.stream, plan.pass_key(b, k)) for k in usable]
        result.append(_forecast(plan, b, "video", wanted, bad=bad, unknown=0))
    for b in plan.row_stages:
        items = [i for k in usable if (i := plan.rows_item(b, k))]
        wanted = [Wanted.of_rows(i) for i in items]
        result.append(_forecast(plan, b, "video", wanted, bad=bad, unknown=len(usable) - len(items)))
    clips = plan.clips()[0] if plan.named(CLIPS) and plan.named(FRAMES) and plan.clip_stages else []
    waiting = sum(_waits(plan, k) for k in usable) if plan.clip_stages else 0
    for b in plan.clip_stages:
        wanted = [Wanted.of_clip(i) for i in plan.clip_items(b, clips)]
        result.append(_forecast(plan, b, "clip", wanted, bad=0, unknown=waiting))
    return result


def _forecast(
    plan: Plan, built: BuiltStage, grain: str, wanted: list[Wanted], *, bad: int, unknown: int
) -> StageForecast:
    states = [plan.state(built, w.item_key) for w in wanted]
    missing = [w for w, s in zip(wanted, states, strict=True) if s is None]
    broken = sum(s is not None and s.state == QUARANTINED for s in states)
    stale: list[tuple[str, ...]] = []
    if missing:
        history = StageHistory(plan.root, plan.ledger, built)
        stale = [past.changed for w in missing if (past := history.past(w))]
    return StageForecast(
        built.key,
        built.fingerprint,
        grain,
        cached=len(wanted) - len(missing) - broken,
        to_compute=len(missing),
        quarantined=bad + broken,
        unknown=unknown,
        stale=len(stale),
        changed=tuple(sorted({name for names in stale for name in names})),
    )


def _waits(plan: Plan, video_key: str) -> bool:
    """Whether a video's clips, or the cached frames they are read from, are still to be made."""
    frames, clips = plan.named(FRAMES), plan.named(CLIPS)
    if frames and plan.state(frames, plan.pass_key(frames, video_key)) is None:
        return True
    item = plan.rows_item(clips, video_key) if clips else None
    return clips is not None and (item is None or plan.state(clips, item.item_key) is None)
