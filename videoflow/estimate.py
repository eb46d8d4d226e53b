"""How much disk a plan's frame cache will take: from header durations of a sample of the files, and a measured rate."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from videoflow.errors import MediaError
from videoflow.media.container import choose_stream, open_media
from videoflow.plan import FRAMES, Plan, VideoSource

#: Bytes of a q90 JPEG per pixel, mean over real footage (the 256-pixel frames of the hard files: 0.20).
BYTES_PER_PIXEL = 0.20
ASSUMED_ASPECT = 16 / 9
SAMPLE_FILES = 50
#: A header that claims more than this per byte is not believed (a fragmented file may claim days).
MIN_BYTES_PER_SECOND = 2_000


def estimate_frames_bytes(plan: Plan, videos: Sequence[VideoSource]) -> int:
    """Bytes of frame cache these videos would add; 0 if there are none. Reads headers of at most 50 local files."""
    frames = plan.named(FRAMES)
    if frames is None or not videos:
        return 0
    step = max(1, len(videos) // SAMPLE_FILES)
    sample = [v for v in list(videos)[::step] if "://" not in v.path]
    seconds = [(v.size, _header_seconds(v)) for v in sample]
    known = [(size, s) for size, s in seconds if s is not None]
    total_size = sum(v.size for v in videos)
    sampled_size = sum(size for size, _ in known)
    duration = sum(s for _, s in known if s) * (total_size / sampled_size if sampled_size else 1.0)
    params = frames.stage.params
    per_frame = params.short_side**2 * ASSUMED_ASPECT * BYTES_PER_PIXEL
    return int(duration * float(Fraction(params.fps)) * per_frame)


def _header_seconds(video: VideoSource) -> float | None:
    try:
        with open_media(video.path) as container:
            choose_stream(container)
            if container.duration is None:
                return None
            return min(container.duration / 1e6, video.size / MIN_BYTES_PER_SECOND)
    except MediaError:
        return None
