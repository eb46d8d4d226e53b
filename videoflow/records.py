"""What passes between stages and those who run them: one small frozen record an arrow of the flow. `videoflow.stage`
has them all under its own name, so that a stage of your own needs one import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import av

    from videoflow.media.picture import Picture


@dataclass(frozen=True)
class VideoHeader:
    """What a consumer is told before the first frame of a video.

    ``start_pts``: the video's first shown pts; ``window``: where a long video is cut between workers, the half-open pts
    interval this pass answers for (no end: to the last frame); frames around it are shown too, see `Margin`.
    """

    video_key: str
    stream: int
    time_base: Fraction
    start_pts: int
    window: tuple[int, int | None] | None = None

    def owns(self, pts: int) -> bool:
        """True if this pass answers for the frame of this pts."""
        if self.window is None:
            return True
        t0, t1 = self.window
        return t0 <= pts and (t1 is None or pts < t1)


@dataclass(frozen=True)
class Margin:
    """What a consumer must see around a window of a video to say of its frames what it would say after the whole video.

    ``frames``: so many before the window and after it; ``seconds``: so much time before it; windows begin at
    multiples of ``align_seconds`` after the video's start.
    """

    frames: int = 0
    seconds: Fraction = Fraction(0)
    align_seconds: int = 1


@dataclass(frozen=True)
class ShownFrame:
    """One shown frame: ``index`` from 0, shown in [pts, next_pts). ``picture`` is only valid during the call."""

    index: int
    pts: int
    next_pts: int
    picture: Picture


@dataclass(frozen=True)
class HeardSound:
    """One decoded piece of an audio stream, from ``pts`` on (units of ``time_base``; None: it has no time of its own).

    ``frame``: FFmpeg's samples as they decode, only valid during the call; ``stream``: its container index;
    ``num_failed``: packets of the stream that did not decode so far.
    """

    pts: int | None
    time_base: Fraction
    frame: av.AudioFrame
    stream: int
    num_failed: int = 0


@dataclass(frozen=True)
class VideoSummary:
    """What is known after the last frame. ``damage``: half-open pts intervals; ``sound_failed``: packets of the heard
    audio stream that did not decode.
    """

    num_frames: int
    end_pts: int
    damage: tuple[tuple[int, int], ...]
    sound_failed: int = 0


def _no_blobs(name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    return iter(())


@dataclass(frozen=True)
class Item:
    """What a VideoStage works on: one video and the rows its inputs made of it.

    ``rows``: by input stage name, the artifact rows as dicts (media columns left out); ``intervals``: half-open
    (t0, t1) in seconds of stream time that a manifest asked for, with their numbers in the manifest's order;
    ``metadata``: the columns of the sources that the stage asked for, as far as they have them; where they differ
    between the video's intervals, they are in ``interval_metadata`` instead, one for each interval; ``blobs``: of an
    input that the stage names in ``media``, each row with its column ``data``, in order of chunks.
    """

    video_key: str
    rows: Mapping[str, list[dict[str, Any]]]
    intervals: tuple[tuple[Fraction, Fraction], ...] = ()
    blobs: Callable[[str], Iterator[tuple[dict[str, Any], bytes]]] = _no_blobs
    metadata: Mapping[str, Any] = field(default_factory=dict)
    interval_metadata: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class ClipFrames:
    """What a ClipStage works on: ``video`` uint8 (T, H, W, 3) RGB, ``pts_seconds`` float64 (T,)."""

    clip_key: str
    video_key: str
    video: np.ndarray
    pts_seconds: np.ndarray


@dataclass(frozen=True)
class SourceClip:
    """What a SourceStage works on: the clip [t0_pts, t1_pts) of one stream, as the decode pass measured it.

    ``pts``: of the shown frames inside it; ``start_pts``: the video's first shown pts, where its grids begin.
    """

    clip_key: str
    video_key: str
    stream: int
    time_base: Fraction
    start_pts: int
    t0_pts: int
    t1_pts: int
    pts: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A stage's result for one item: rows without the head columns, and a digest of their bytes and integers
    (floats left out, so that early cut-off never hangs on rounding). ``filtered``: a reason to leave the item out."""

    rows: Sequence[Mapping[str, Any]] = ()
    digest: str = ""
    filtered: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
