"""What a stage learns from the data before it can work (a codebook): once in a catalog, kept there, the same for good.

What was learned is named by what there was to learn (`ClipStage.fit_key`) and by the pictures it was learned from (the
fingerprint of the stage that made them), never by the videos: new videos do not change it, so nothing is computed
again. It is written by put-if-absent, so that of several jobs at once all use the first one's. A stage's fingerprint
holds its digest; until it is there, a plan counts items under a fingerprint of its own. See decisions/0019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from videoflow.dataset.placed import PlacedClips
from videoflow.errors import BadSample, SystemFailure
from videoflow.fingerprint import fingerprint
from videoflow.keys import digest
from videoflow.loader.engine_cpu import CpuEngine
from videoflow.loader.reader import ClipReader
from videoflow.recipe import BuiltStage
from videoflow.stage import ClipFrames, ClipStage
from videoflow.store.layout import FITS, Root

if TYPE_CHECKING:
    from videoflow.execute import Progress
    from videoflow.plan import Plan

#: A stage learns from the clips with the smallest keys: keys are hashes, so this is a sample that anybody draws again.
SAMPLE_CLIPS = 256


def settled(root: Root, built: Sequence[BuiltStage]) -> tuple[BuiltStage, ...]:
    """The stages with what they have learned in this catalog before."""
    return tuple(_settled(root, b, built) for b in built)


def _settled(root: Root, built: BuiltStage, others: Sequence[BuiltStage]) -> BuiltStage:
    path = _path(built, others)
    learned = root.get(path) if path else None
    return built if learned is None else _with(built, learned)


def _path(built: BuiltStage, others: Sequence[BuiltStage]) -> str | None:
    """Where what a stage learns is kept; None for one that learns nothing (more)."""
    key = built.stage.fit_key() if isinstance(built.stage, ClipStage) else None
    if key is None:
        return None
    pictures = sorted(b.fingerprint for b in others if b.name in built.stage.inputs and b.name != "clips")
    return f"{FITS}/{built.name}/{digest(key, pictures)}"


def _with(built: BuiltStage, learned: bytes) -> BuiltStage:
    assert isinstance(built.stage, ClipStage)
    stage = built.stage.with_fit(learned)
    return replace(built, stage=stage, fingerprint=fingerprint(stage))


def fit_stages(plan: Plan, clips: PlacedClips, progress: Progress) -> None:
    """Have every stage of the plan learn what it has not learned yet; without clips there is nothing to learn for."""
    for b in plan.clip_stages:
        path = _path(b, plan.built)
        if path is None or not len(clips):
            continue
        which = _sample(clips)
        progress.note(f"{b.key}: learns from {int(which.sum())} of {len(clips)} clips")
        assert isinstance(b.stage, ClipStage)
        plan.root.put_new(path, b.stage.fit(_frames(plan, b, clips, which)))
        learned = plan.root.get(path)  # another job's, if that one was first
        if learned is None:
            raise SystemFailure(f"cannot read {plan.root.uri(path)}, which was just written; run again")
        plan.replace(_with(b, learned))
        progress.note(f"{b.key}: what it learned is kept in {path}")


def _sample(clips: PlacedClips) -> np.ndarray:
    keys = clips.table["clip_key"]
    first = np.asarray(pc.sort_indices(keys))[:SAMPLE_CLIPS]
    which = np.zeros(len(clips), np.bool_)
    which[first] = True
    return which


def _frames(plan: Plan, built: BuiltStage, clips: PlacedClips, which: np.ndarray) -> Iterator[ClipFrames]:
    """The frames of some clips, one after the other; those whose cached bytes are damaged are left out."""
    source = plan.named("frames")
    assert source is not None
    reader = ClipReader([plan.root.uri(p) for p in plan.parts(source)], plan.root.lance_options())
    engine = CpuEngine(threads=1)
    try:
        for item in plan.clip_work(built, clips, which):
            try:
                (encoded,) = reader.read([item.clip], [item.wanted])
                (video,) = engine.decode([encoded], size=None, fit="crop")
            except BadSample:
                continue
            yield ClipFrames(item.clip.clip_key, item.video_key, np.asarray(video), encoded.pts_seconds)
    finally:
        engine.close()
