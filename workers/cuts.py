"""From per-frame scores to cuts: integers in, integers out, no pictures.

The shots stage places its default cuts with it, the clips stage cuts stored scores again at another threshold. A score
says how much its frame looks like the first frame of a new shot, in thousandths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Threshold by detector, in thousandths; a frame above it belongs to a transition.
#: hsv: 15 of 255 grey levels above the neighbourhood, the ``min_content_val`` of PySceneDetect's AdaptiveDetector.
#: transnetv2: 0.5, as in the reference implementation.
DEFAULT_THRESHOLD: dict[str, int] = {"hsv": 15 * 1000 // 255, "transnetv2": 500}


def cuts_from_scores(scores: Sequence[int], threshold: int, *, min_gap: int = 1) -> list[int]:
    """First frames of new shots.

    Neighbouring frames above the threshold are one transition; its last frame begins the new shot (the rule of
    TransNetV2's ``predictions_to_scenes``, whose scores lie one frame earlier than ours).

    Args:
        scores: thousandths, one per shown frame; the first one is never a cut.
        threshold: scores above it count.
        min_gap: a cut that comes fewer frames after the cut before it (or the start) is left out.
    """
    cuts: list[int] = []
    last = 0
    for i in range(1, len(scores)):
        ends_run = i + 1 == len(scores) or scores[i + 1] <= threshold
        if scores[i] > threshold and ends_run and i - last >= min_gap:
            cuts.append(i)
            last = i
    return cuts


def shots_of(cuts: Sequence[int], num_frames: int) -> list[tuple[int, int]]:
    """Shots as half-open ranges of frames; they tile [0, num_frames)."""
    edges = [0, *cuts, num_frames]
    return [(a, b) for a, b in pairwise(edges) if a < b]
