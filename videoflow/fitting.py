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

from videoflow.chosen import tables_read
from videoflow.dataset.placed import PlacedClips
from videoflow.errors import BadSample, MissingWeights, SystemFailure, first_line
from videoflow.fingerprint import fingerprint
from videoflow.keys import digest
from videoflow.loader.payload import PayloadEngine, PayloadReader
from videoflow.loader.reader import ClipReader
from videoflow.recipe import BuiltStage
from videoflow.stage import ClipFrames, ClipStage
from videoflow.store.damage import damaged
from videoflow.store.layout import FITS, Root
from videoflow.store.states import NOWHERE

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
    return _with(root, path, built, learned) if path and learned is not None else built


def _path(built: BuiltStage, others: Sequence[BuiltStage]) -> str | None:
    """Where what a stage learns is kept; None for one that learns nothing (more)."""
    key = built.stage.fit_key() if isinstance(built.stage, ClipStage) else None
    if key is None:
        return None
    pictures = sorted(b.fingerprint for b in others if b.name in built.stage.inputs and b.name != "clips")
    return f"{FITS}/{built.name}/{digest(key, pictures)}"


def _with(root: Root, path: str, built: BuiltStage, learned: bytes) -> BuiltStage:
    """Raises DamagedCatalog where it is not what a stage of this kind learns."""
    assert isinstance(built.stage, ClipStage)
    try:
        stage = built.stage.with_fit(learned)
    except MissingWeights as e:
        raise damaged(root.url, path, first_line(e)) from e
    return replace(built, stage=stage, fingerprint=fingerprint(stage))


def fitted(plan: Plan, built: BuiltStage, clips: PlacedClips, progress: Progress) -> BuiltStage:
    """A stage of the plan that has learned what it needs; without clips there is nothing to learn from."""
    path = _path(built, plan.built)
    if path is None or not len(clips):
        return built
    which = _sample(clips, plan.clip_items(built, clips).exists)
    if not which.any():
        return built
    progress.note(f"{built.key}: learns from {int(which.sum())} of {len(clips)} clips")
    assert isinstance(built.stage, ClipStage)
    plan.root.put_new(path, built.stage.fit(_frames(plan, built, clips, which)))
    learned = plan.root.get(path)  # another job's, if that one was first
    if learned is None:
        raise SystemFailure(f"cannot read {plan.root.uri(path)}, which was just written; run again")
    made = _with(plan.root, path, built, learned)
    plan.replace(made)
    progress.note(f"{built.key}: what it learned is kept in {path}")
    return made


def _sample(clips: PlacedClips, has_pictures: np.ndarray) -> np.ndarray:
    """The first clips in the order of their keys, as a mask."""
    order = np.asarray(pc.sort_indices(clips.table["clip_key"]))
    which = np.zeros(len(clips), np.bool_)
    which[order[has_pictures[order]][:SAMPLE_CLIPS]] = True
    return which


def _frames(plan: Plan, built: BuiltStage, clips: PlacedClips, which: np.ndarray) -> Iterator[ClipFrames]:
    """The frames of some clips, one after the other; those whose stored bytes are damaged are left out."""
    ((name, parts),) = tables_read(plan, built, frames="frames").items()
    make_reader = ClipReader if name == "frames" else PayloadReader
    reader = make_reader([plan.root.uri(p) for p in parts], plan.root.lance_options())
    items = replace(plan.clip_items(built, clips), found=np.where(which, NOWHERE, 0))
    engine = PayloadEngine(threads=1)
    try:
        for item in plan.missing_clips(built, clips, items):
            try:
                (encoded,) = reader.read([item.clip], [item.wanted])
                (video,) = engine.decode([encoded], size=None, fit="crop")
            except BadSample:
                continue
            yield ClipFrames(item.clip.clip_key, item.video_key, np.asarray(video), encoded.pts_seconds)
    finally:
        engine.close()
