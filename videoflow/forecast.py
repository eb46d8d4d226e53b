"""What `videoflow plan` says: per stage cached, to compute, stale, quarantined, and what cannot be known yet. And what
a job says at its end: how each video fared over all stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.chosen import estimated_bytes, payloads_to_come, seconds_by_video
from videoflow.dataset.placed import PlacedClips
from videoflow.history import StageHistory, Wanted
from videoflow.plan import CLIPS, FRAMES, KEYS_AT_ONCE, Plan, StageItems
from videoflow.recipe import BuiltStage
from videoflow.stage import SourceStage
from videoflow.store.states import FILTERED, NOWHERE, QUARANTINED


@dataclass(frozen=True)
class StageForecast:
    """What `videoflow plan` says of one stage.

    Attributes:
        to_compute: items without a result; stale: of these, items that have one under another fingerprint or from
        another input. changed: the components that differ (see `videoflow.history`).
        unknown: videos whose items show only after decoding. seconds, num_bytes: of the chosen clips
        that are decoded once more, and about what they will take.
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
    seconds: float = 0.0
    num_bytes: int = 0


def forecast(plan: Plan) -> list[StageForecast]:
    """Per stage: cached, to compute, stale, quarantined, and what cannot be known before upstream stages have run."""
    result = []
    usable = ~plan.unusable()
    bad = int((~usable).sum())
    for b in plan.consumers:
        wanted = partial(_of_videos, plan, b)
        result.append(_forecast(plan, b, plan.items(b), usable, wanted=wanted, bad=bad))
    for b in plan.row_stages:
        items, wanted = plan.items(b), partial(_of_rows, plan, b)
        unknown = int((usable & ~items.exists).sum())
        result.append(_forecast(plan, b, items, usable & items.exists, wanted=wanted, bad=bad, unknown=unknown))
    if plan.clip_stages and plan.named(CLIPS) and plan.named(FRAMES):
        clips, waiting = plan.clips(), int((usable & _waits(plan)).sum())
        for b in plan.clip_stages:
            items = plan.clip_items(b, clips)
            wanted = partial(_of_clips, clips, items)
            there = items.exists
            unknown = waiting + (payloads_to_come(plan, b, clips) if not there.all() else 0)
            found = _forecast(plan, b, items, there, wanted=wanted, unknown=unknown, grain="clip")
            if isinstance(b.stage, SourceStage):
                seconds = sum(seconds_by_video(clips, items.missing).values())
                size = sum(estimated_bytes(plan, b, clips, items.missing).values())
                found = replace(found, seconds=seconds, num_bytes=int(size))
            result.append(found)
    return result


def _forecast(
    plan: Plan,
    built: BuiltStage,
    items: StageItems,
    counts: np.ndarray,
    *,
    wanted: Callable[[np.ndarray], list[Wanted]],
    bad: int = 0,
    unknown: int = 0,
    grain: str = "video",
) -> StageForecast:
    """``counts``: by item, whether it is asked for. ``wanted``: describes the items at some positions."""
    missing = np.flatnonzero(counts & items.missing)
    broken = int((counts & plan.has_state(built, items, QUARANTINED)).sum())
    stale: Counter[tuple[str, ...]] = Counter()
    if len(missing):
        history = StageHistory(plan.root, plan.ledger, built)
        for at in range(0, len(missing), KEYS_AT_ONCE):
            stale.update(past.changed for past in history.pasts(wanted(missing[at : at + KEYS_AT_ONCE])) if past)
    return StageForecast(
        built.key,
        built.fingerprint,
        grain,
        cached=int(counts.sum()) - len(missing) - broken,
        to_compute=len(missing),
        quarantined=bad + broken,
        unknown=unknown,
        stale=stale.total(),
        changed=tuple(sorted({name for names in stale for name in names})),
    )


def video_states(plan: Plan, clips: PlacedClips) -> Counter[str]:
    """done | filtered | quarantined | pending, by video. A video is done when every stage of it and its clips
    ended.
    """
    unusable = plan.unusable()
    pending, bad, filtered = (np.zeros(len(plan.keys), bool) for _ in range(3))
    for b in [*plan.consumers, *plan.row_stages]:
        items = plan.items(b)
        counts = ~unusable & (items.exists | ~bad)  # without an item because an input is bad: nothing to wait for
        pending |= counts & (items.found == NOWHERE)
        bad |= counts & plan.has_state(b, items, QUARANTINED)
        filtered |= counts & plan.has_state(b, items, FILTERED)
    bad |= unusable
    if len(clips) and plan.clip_stages:
        videos = pc.index_in(clips.table["video_key"], value_set=pa.array(plan.keys, pa.string()))
        videos = np.asarray(videos, np.int64)
    for b in plan.clip_stages if len(clips) else ():
        items = plan.clip_items(b, clips)  # a filtered clip does not filter its video
        pending[videos[items.missing]] = True
        bad[videos[plan.has_state(b, items, QUARANTINED)]] = True
    return Counter(
        {
            "pending": int(pending.sum()),
            QUARANTINED: int((bad & ~pending).sum()),
            FILTERED: int((filtered & ~bad & ~pending).sum()),
            "done": int((~filtered & ~bad & ~pending).sum()),
        }
    )


def _of_videos(plan: Plan, built: BuiltStage, at: np.ndarray) -> list[Wanted]:
    keys = (plan.keys[i] for i in at)
    return [Wanted.of_pass(k, plan.recipe.stream, plan.pass_key(built, k)) for k in keys]


def _of_rows(plan: Plan, built: BuiltStage, at: np.ndarray) -> list[Wanted]:
    which = np.zeros(len(plan.keys), bool)
    which[at] = True
    return [Wanted.of_rows(i) for i in plan.rows_items(built, which)]


def _of_clips(clips: PlacedClips, items: StageItems, at: np.ndarray) -> list[Wanted]:
    columns = (clips.table["video_key"], items.inputs, items.keys, clips.table["clip_key"])
    rows = zip(*(c.take(pa.array(at)).to_pylist() for c in columns), strict=True)
    return [Wanted.of_clip(*row) for row in rows]


def _waits(plan: Plan) -> np.ndarray:
    """By video: whether its clips, or the cached frames they are read from, are still to be made."""
    waits = np.zeros(len(plan.keys), bool)
    for name in (FRAMES, CLIPS):
        if built := plan.named(name):
            waits |= plan.items(built).found == NOWHERE
    return waits
