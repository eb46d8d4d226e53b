"""What a plan will cost: hours of video to decode, bytes of frame cache, and time, as past jobs took.

Hours and frames come from the headers of a sample of the local files; where there are none to look at, from the
videos that the catalog knows. Times are worker seconds a frame (decoding) or an item (later stages) of the newest past
jobs in this catalog, those with the same parameters first; items that show only after decoding are as many a video as
they were there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pyarrow.compute as pc

from videoflow.dataset.catalog import Catalog
from videoflow.errors import MediaError
from videoflow.forecast import StageForecast
from videoflow.jobrecord import FINISHED, all_jobs
from videoflow.media.container import choose_stream, open_media
from videoflow.plan import FRAMES, Plan, VideoSource
from videoflow.recipe import PROBE
from videoflow.stage import CPU
from videoflow.store.reader import read_rows

#: Bytes of a q90 JPEG per pixel, mean over real footage (the 256-pixel frames of the hard files: 0.20).
BYTES_PER_PIXEL = 0.20
ASSUMED_ASPECT = 16 / 9
ASSUMED_RATE = 25.0
SAMPLE_FILES = 50
#: A header that claims more than this per byte is not believed (a fragmented file may claim days).
MIN_BYTES_PER_SECOND = 500
#: Newest jobs whose times are believed, and all that are looked at for them.
JOBS_BELIEVED, JOBS_SEEN = 10, 200
#: What a job calls its decoding; the parts of long videos have a name of their own.
DECODE = "decode"
_DECODING = (DECODE, "decode parts")


@dataclass(frozen=True)
class Estimate:
    """What is to come; None where nothing is known.

    Attributes:
        video_seconds, frames: of the videos to decode. frame_cache_bytes: that they add. workers: that share the time.
        stage_seconds: wall time by stage, ``decode`` for the pass; stages that have nothing to do are left out.
        jobs: past jobs that the times come from.
    """

    video_seconds: float | None
    frames: int | None
    frame_cache_bytes: int | None
    workers: int
    stage_seconds: dict[str, float | None] = field(default_factory=dict)
    jobs: int = 0


def estimate(
    catalog: Catalog, plan: Plan, stages: Sequence[StageForecast], videos: Sequence[VideoSource], *, workers: int
) -> Estimate:
    """What a plan will cost, of which ``videos`` are to be decoded. Reads headers of at most 50 local files."""
    seconds, frames = _length(catalog, plan, videos) if videos else (0.0, 0)
    jobs = _Past(catalog, plan)
    times: dict[str, float | None] = {}
    if videos:
        each = jobs.decode_seconds_per_frame()
        times[DECODE] = None if each is None or frames is None else each * frames / workers
    later = {b.key for b in [*plan.row_stages, *plan.clip_stages]}
    for s in stages:
        if s.stage in later and (s.to_compute or s.unknown):
            each = jobs.seconds_per_item(s.stage)
            to_come = jobs.items_of(s.stage, s.unknown, clips=s.grain == "clip") if s.unknown else 0.0
            if each is None or to_come is None:
                times[s.stage] = None
            else:
                times[s.stage] = each * (s.to_compute + to_come) / workers
    cache = _cache_bytes(plan, seconds)
    return Estimate(seconds, frames, cache, workers, times, len(jobs.believed))


def _cache_bytes(plan: Plan, seconds: float | None) -> int | None:
    frames = plan.named(FRAMES)
    if frames is None or seconds is None:
        return 0 if frames is None else None
    params = frames.stage.params
    per_frame = params.short_side**2 * ASSUMED_ASPECT * BYTES_PER_PIXEL
    return int(seconds * float(Fraction(params.fps)) * per_frame)


# -- length ----------------------------------------------------------------------------------------------------------


def _length(catalog: Catalog, plan: Plan, videos: Sequence[VideoSource]) -> tuple[float | None, int | None]:
    """Seconds and frames of some videos, from a sample's bytes."""
    step = max(1, len(videos) // SAMPLE_FILES)
    seen = [(v.size, _header(v)) for v in list(videos)[::step] if "://" not in v.path]
    known = [(size, *header) for size, header in seen if header is not None]
    known = known or _known_lengths(catalog, plan)
    size = sum(k[0] for k in known)
    if not size:
        return (0.0, 0) if seen else (None, None)
    scale = sum(v.size for v in videos) / size
    return sum(k[1] for k in known) * scale, int(sum(k[2] for k in known) * scale)


def _header(video: VideoSource) -> tuple[float, float] | None:
    """Seconds and frames that a file's header claims."""
    try:
        with open_media(video.path) as container:
            stream = choose_stream(container)
            if container.duration is None:
                return None
            seconds = min(container.duration / 1e6, video.size / MIN_BYTES_PER_SECOND)
            return seconds, seconds * float(stream.average_rate or ASSUMED_RATE)
    except MediaError:
        return None


def _known_lengths(catalog: Catalog, plan: Plan) -> list[tuple[int, float, float]]:
    """Bytes, seconds and frames of all videos that this catalog has decoded."""
    probe = plan.named(PROBE)
    sizes = {row.video_key: int(row.size or 0) for row in catalog.known_sources().values()}
    found: list[tuple[int, float, float]] = []
    for part in plan.parts(probe) if probe else ():
        table = read_rows(plan.root, part, ["video_key", "duration_us", "num_frames"])
        table = table.filter(pc.greater(table["num_frames"], 0))
        rows = zip(*(table[c].to_pylist() for c in ("video_key", "duration_us", "num_frames")), strict=True)
        found += [(sizes[key], us / 1e6, n) for key, us, n in rows if sizes.get(key) and us]
    return found


# -- time ------------------------------------------------------------------------------------------------------------


class _Past:
    """Finished jobs of a catalog, newest first, and what their stages took."""

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        jobs = [j for j in all_jobs(catalog.root, bad=[])[-JOBS_SEEN:] if j["state"] == FINISHED and j.get("summary")]
        self._jobs = jobs[::-1]
        self._plan = plan
        self._stages = plan.recipe.model_dump(mode="json")["stages"]
        self.believed: set[str] = set()

    def decode_seconds_per_frame(self) -> float | None:
        found = []
        for job in self._jobs:
            seconds = sum(self._took(job, name).get("worker_seconds", 0.0) for name in _DECODING)
            frames = sum((job.get("stages") or {}).get(name, {}).get("frames_decoded", 0) for name in _DECODING)
            if job["recipe"].get("decoder", CPU) == self._plan.recipe.decoder:
                found.append((job, seconds, frames))
        return self._rate(found, [b.key for b in self._plan.consumers])

    def items_of(self, stage: str, videos: int, *, clips: bool) -> float | None:
        """How many items of a stage so many videos will have, as those of past jobs that decoded theirs had."""
        if not clips:
            return float(videos)
        took = [(self._took(job, stage).get("items", 0), self._took(job, DECODE).get("items", 0)) for job in self._jobs]
        took = [(items, decoded) for items, decoded in took if items and decoded][:JOBS_BELIEVED]
        return videos * sum(t[0] for t in took) / sum(t[1] for t in took) if took else None

    def seconds_per_item(self, stage: str) -> float | None:
        took = [(job, self._took(job, stage)) for job in self._jobs]
        return self._rate([(j, t.get("worker_seconds", 0.0), t.get("items", 0)) for j, t in took], [stage])

    @staticmethod
    def _took(job: dict[str, Any], stage: str) -> dict[str, Any]:
        """Items and worker seconds of a stage of a job."""
        took = (job["summary"].get("stages") or {}).get(stage)
        return took if isinstance(took, dict) else {}

    def _rate(self, found: Sequence[tuple[dict[str, Any], float, int]], stages: Sequence[str]) -> float | None:
        """Seconds each over the newest jobs that did something, of those with the same parameters if there are any."""
        did = [f for f in found if f[1] and f[2]]
        same = [f for f in did if all(_of(f[0], s) == self._stages.get(s) for s in stages)]
        chosen = (same or did)[:JOBS_BELIEVED]
        self.believed.update(job["job"] for job, _, _ in chosen)
        return sum(f[1] for f in chosen) / sum(f[2] for f in chosen) if chosen else None


def _of(job: dict[str, Any], stage: str) -> Any:
    """A stage's part of the recipe of a recorded job."""
    stages = job["recipe"].get("stages")
    return stages.get(stage) if isinstance(stages, dict) else None
