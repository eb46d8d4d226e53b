"""Long videos: cut between workers when there are fewer videos to decode than work for everybody.

Three rounds: look where a video can be cut, decode the parts, join them. What cannot be cut (docs/sources.md says what
can), or turns out to be damaged on the way, is decoded unsplit; the results are the same by every digest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from videoflow.plan import VideoSource
from videoflow.stage import PassConsumer
from videoflow.unit import DecodeItem, JoinItem, PartItem, PartResult, SplitItem, StageWork, UnitReport, VideoPart

#: Smaller files are not worth a look: at 4 Mbit/s this is a minute.
MIN_BYTES = 32 << 20
#: Parts are no shorter: each decodes up to a GOP and the lead-in twice.
MIN_PART_SECONDS = 60.0


class LongVideos:
    """Which videos of a job are cut, and what has come of them so far."""

    def __init__(self) -> None:
        self._unfit: dict[str, str] = {}
        self._unsaid: list[str] = []
        self._joining: set[str] = set()
        self._items: dict[str, DecodeItem] = {}
        self._parts: dict[str, tuple[VideoPart, ...]] = {}
        self._done: dict[str, dict[int, PartResult]] = {}

    def begin_round(self) -> None:
        """What was joined and is missing all the same is decoded unsplit now."""
        self._unfit |= dict.fromkeys(self._joining, "its joined parts were not taken")
        self._joining.clear()

    def to_look_into(self, works: Sequence[StageWork], videos: Sequence[VideoSource], share: float) -> list[SplitItem]:
        """Long videos among ``videos``, where every video would have to make ``share`` units to keep all workers busy.
        Local files only: a remote one would be fetched once for every part.
        """
        stages = [w.stage for w in works]
        if share <= 1 or any(not isinstance(s, PassConsumer) or s.margin() is None for s in stages):
            return []
        most = math.ceil(share)
        found = []
        for v in videos:
            is_long = v.size >= MIN_BYTES and "://" not in v.path
            if is_long and v.video_key not in self._unfit:
                self._items[v.video_key] = v.decode_item
                found.append(SplitItem(v.decode_item, most, MIN_PART_SECONDS))
        return found

    def took(self, report: UnitReport) -> None:
        """Remember what a worker found or decoded."""
        self._unfit |= report.unfit
        self._unsaid += report.unfit.values()
        for key, parts in report.splits.items():
            self._parts[key] = parts
            self._done[key] = {}
        for part in report.parts:
            self._done[part.video_key][part.number] = part

    def parts_of(self, video_key: str) -> list[PartItem]:
        """What is to be decoded of a video that is cut; nothing where it is not."""
        if video_key in self._unfit:
            return []
        return [PartItem(self._items[video_key], part) for part in self._parts.get(video_key, ())]

    def reasons(self) -> list[str]:
        """Why videos are decoded unsplit, each reason once with its count; what was said is not said again."""
        counts = Counter(self._unsaid)
        self._unsaid.clear()
        return [
            f"{n} long {'video is' if n == 1 else 'videos are'} decoded unsplit: {why}" for why, n in counts.items()
        ]

    def joins(self) -> list[JoinItem]:
        """Videos whose parts are all there; each is given out once."""
        ready = []
        for key, parts in list(self._parts.items()):
            done = self._done[key]
            if key not in self._unfit and len(done) == len(parts):
                ready.append(JoinItem(self._items[key], tuple(done[n] for n in sorted(done))))
                self._joining.add(key)
            del self._parts[key], self._done[key]
        return ready

    def was_joined(self, video_key: str) -> bool:
        """True if it needs no pass of its own."""
        return video_key in self._joining and video_key not in self._unfit
