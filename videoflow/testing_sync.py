"""A video that shows and says when it is: a flash and a click at the same instant, at every whole second.

It ships with the library so that users can put their own pipeline to the test: what is delivered as the flash's pts
must be where the click is heard. Made with PyAV alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

FLASH_SIDE = 64
#: A click is a Gaussian pulse: symmetric, so that its peak stays where it is through any resampler or lossy coder.
CLICK_SIGMA_SECONDS = 0.25e-3
CLICK_PEAK = 0.8
_VIDEO_CLOCK = 90_000


def steady(rate: int, *, first: object = 0, seconds: int = 6) -> list[Fraction]:
    """Times of frames at a steady rate, from ``first`` on."""
    return [Fraction(str(first)) + Fraction(k, rate) for k in range(rate * seconds)]


def unsteady(*, first: object = 0, seconds: int = 6) -> list[Fraction]:
    """Times of frames at changing steps (whole milliseconds); one of them at every whole second after the first."""
    steps = (40, 17, 100, 33, 250, 60, 140, 80, 20, 160, 30, 70)  # 1,000 ms
    begin = Fraction(str(first))
    return [begin + k + Fraction(sum(steps[:i]), 1000) for k in range(seconds) for i in range(len(steps))]


def make_sync_video(
    path: str | Path,
    *,
    frames: Sequence[Fraction],
    sound: tuple[object, object],
    hole: tuple[object, object] | None = None,
    codec: str = "pcm_s16le",
    rate: int = 48_000,
    channels: int = 1,
    video_codec: str = "libx264",
) -> Path:
    """Write a video whose frames at whole seconds are white and all others black, with a click at every whole second.

    Args:
        path: its suffix names the container (.mov takes PCM and AAC, .mkv takes FLAC, Opus and AAC).
        frames: stream time of each frame, in seconds.
        sound: stream times at which the sound begins and ends; hole: nothing is heard in between.
        codec, rate, channels: of the sound.
    """
    with av.open(str(path), "w") as out:
        video: Any = out.add_stream(video_codec, rate=30)
        video.width = video.height = FLASH_SIDE
        video.pix_fmt = "yuv420p"
        video.time_base = video.codec_context.time_base = Fraction(1, _VIDEO_CLOCK)
        audio: Any = out.add_stream(codec, rate=rate, layout="mono" if channels == 1 else "stereo")
        pictures, sounds = _pictures(frames), _sounds(audio, sound, hole, rate, channels)
        waiting = [next(pictures, None), next(sounds, None)]
        while any(waiting):
            is_sound = waiting[0] is None or (waiting[1] is not None and waiting[1][0] < waiting[0][0])
            stream, following = (audio, sounds) if is_sound else (video, pictures)
            at = waiting[is_sound]
            assert at is not None
            out.mux(stream.encode(at[1]))
            waiting[is_sound] = next(following, None)
        out.mux(video.encode(None))
        out.mux(audio.encode(None))
    return Path(path)


def _pictures(frames: Sequence[Fraction]) -> Iterator[tuple[Fraction, Any]]:
    for at in frames:
        luma = 235 if at.denominator == 1 else 16
        planes = np.full((FLASH_SIDE * 3 // 2, FLASH_SIDE), 128, np.uint8)
        planes[:FLASH_SIDE] = luma
        frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
        frame.pts, frame.time_base = round(at * _VIDEO_CLOCK), Fraction(1, _VIDEO_CLOCK)
        yield at, frame


def _sounds(
    stream: Any, sound: tuple[object, object], hole: tuple[object, object] | None, rate: int, channels: int
) -> Iterator[tuple[Fraction, Any]]:
    begin, end = (Fraction(str(t)) for t in sound)
    stretches = [(begin, end)]
    if hole is not None:
        stretches = [(begin, Fraction(str(hole[0]))), (Fraction(str(hole[1])), end)]
    stream.codec_context.open()
    size = stream.codec_context.frame_size or 1024
    kind = stream.codec_context.format.name
    for t0, t1 in stretches:
        first = round(t0 * rate)
        for at in range(first, round(t1 * rate), size):  # whole frames: coders take no short one before the last
            values = np.repeat(clicks(at, size, rate)[None], channels, axis=0)
            frame = av.AudioFrame.from_ndarray(_as(kind, values), format=kind, layout=stream.codec_context.layout.name)
            frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
            yield Fraction(at, rate), frame


def clicks(at: int, count: int, rate: int) -> np.ndarray:
    """Samples at … at + count of the sound: a pulse at every whole second, float64."""
    seconds = np.arange(at, at + count) / rate
    off = seconds - np.rint(seconds)
    return CLICK_PEAK * np.exp(-0.5 * (off / CLICK_SIGMA_SECONDS) ** 2)


def _as(kind: str, values: np.ndarray) -> np.ndarray:
    """Samples (channels, n) in one of FFmpeg's formats, packed or planar."""
    scale, dtype = {"s16": (32767, np.int16), "s32": (2**31 - 1, np.int32)}.get(kind.removesuffix("p"), (1, np.float32))
    scaled = np.rint(values * scale) if scale > 1 else values
    made = scaled.astype(dtype)
    return np.ascontiguousarray(made if kind.endswith("p") else made.T.reshape(1, -1))
