"""Decoding with plain threads and libjpeg-turbo, straight into the batch's buffer. Strict: damage raises instead of
passing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import simplejpeg

from videoflow.errors import BadSample
from videoflow.loader.buffers import BufferPool
from videoflow.loader.engine import check_clips
from videoflow.loader.fit import fit_into, place
from videoflow.loader.reader import EncodedClip

#: Slices of work a thread gets per batch, so that uneven pictures do not leave one thread alone at the end.
SLICES_PER_THREAD = 4


class CpuEngine:
    """Decodes on the CPU. ``threads``: decoding threads; they start with the first batch."""

    name = "cpu"

    def __init__(self, *, threads: int = 2) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._buffers = BufferPool()

    def __repr__(self) -> str:
        return f"CpuEngine(threads={self._threads})"

    def decode(self, clips: Sequence[EncodedClip], *, size: tuple[int, int] | None, fit: str) -> np.ndarray:
        """See ``DecodeEngine.decode``; returns a numpy array, uint8 (B, T, H, W, 3)."""
        check_clips(clips, size)
        height, width = size or (clips[0].height, clips[0].width)
        out = self._buffers.take((len(clips), len(clips[0].payloads), height, width, 3))
        work = [
            (b, t) for b, clip in enumerate(clips) for t in range(len(clip.payloads)) if is_first_of_its_frame(clip, t)
        ]

        def run(part: list[tuple[int, int]]) -> None:
            for b, t in part:
                decode_into(clips[b], t, out[b, t], size, fit)

        if self._threads == 1 or len(work) == 1:
            run(work)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="videoflow-decode")
            step = -(-len(work) // (self._threads * SLICES_PER_THREAD))
            list(self._pool.map(run, [work[i : i + step] for i in range(0, len(work), step)]))
        _copy_repeats(clips, out)
        return out

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._buffers.clear()


def is_first_of_its_frame(clip: EncodedClip, t: int) -> bool:
    """False if frame t is the one before once more (padding, or a frame shown longer than a step)."""
    return t == 0 or clip.pts[t] != clip.pts[t - 1]


def _copy_repeats(clips: Sequence[EncodedClip], out: np.ndarray) -> None:
    for b, clip in enumerate(clips):
        for t in range(1, len(clip.payloads)):
            if not is_first_of_its_frame(clip, t):
                out[b, t] = out[b, t - 1]


def decode_into(clip: EncodedClip, t: int, out: np.ndarray, size: tuple[int, int] | None, fit: str) -> None:
    """Decode frame t of a clip into ``out``, uint8 (H, W, 3).

    Raises:
        BadSample: it does not decode, or not to the size that its row says.
    """
    placement = place(clip.height, clip.width, size, fit)
    direct = placement.is_copy and placement.fills and placement.size == (clip.height, clip.width)
    picture = decode_jpeg(clip, t, out if direct else None)
    if picture.shape[:2] != (clip.height, clip.width):
        raise BadSample(
            f"clip {clip.clip_key}: its frame at pts {clip.pts[t]} is {picture.shape[0]}×{picture.shape[1]}, "
            f"its row says {clip.height}×{clip.width}"
        )
    if not direct:
        fit_into(picture, placement, out)


def decode_jpeg(clip: EncodedClip, t: int, out: np.ndarray | None = None) -> np.ndarray:
    """Decode one JPEG, uint8 (h, w, 3); into ``out`` if it is given and the size is right.

    Raises:
        BadSample: it does not decode.
    """
    try:
        return simplejpeg.decode_jpeg(clip.payloads[t], colorspace="RGB", strict=True, buffer=out)
    except (ValueError, TypeError) as e:
        raise BadSample(f"clip {clip.clip_key}: its frame at pts {clip.pts[t]} does not decode: {e}") from e
