"""Synthetic inputs and golden paths that ship with the library, for its own tests and for its users'.

The barcode pattern: 128×64 pictures of 16 blocks, each 8 pixels wide; block k from the left is bright (luma about 220)
when bit k of the frame number is set, else dark (about 30). A frame that comes back says which frame it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from videoflow.errors import InputError
from videoflow.find import find_stage

BARCODE_WIDTH, BARCODE_HEIGHT, BARCODE_BLOCK = 128, 64, 8
_ROWS = slice(8, 24)
_THRESHOLD = 125


def read_barcode(picture: np.ndarray) -> int:
    """Frame number shown by a barcode picture uint8 (64, 128, 3) or (64, 128).

    Raises:
        ValueError: the picture is not 128 wide.
    """
    if picture.shape[1] != BARCODE_WIDTH:
        raise ValueError(f"a barcode is {BARCODE_WIDTH} pixels wide, this picture is {picture.shape[1]}")
    gray = picture.mean(axis=2) if picture.ndim == 3 else picture
    blocks = gray[_ROWS].reshape(-1, BARCODE_WIDTH // BARCODE_BLOCK, BARCODE_BLOCK).mean(axis=(0, 2))
    return int(sum(1 << k for k, level in enumerate(blocks) if level > _THRESHOLD))


def make_barcode_video(
    path: str | Path,
    *,
    num_frames: int,
    rate: str = "30",
    offset: int = 0,
    codec: tuple[str, ...] = ("-c:v", "libx264"),
) -> Path:
    """Write a barcode video with the FFmpeg command line; frame i shows number ``offset + i``.

    Raises:
        InputError: no ``ffmpeg`` on PATH, or it failed (its last line).
    """
    if shutil.which("ffmpeg") is None:
        raise InputError("make_barcode_video needs the ffmpeg command: apt-get install ffmpeg")
    path = Path(path)
    pattern = f"if(mod(floor((N+{offset})/pow(2\\,floor(X/{BARCODE_BLOCK})))\\,2)\\,220\\,30)"
    source = f"nullsrc=s={BARCODE_WIDTH}x{BARCODE_HEIGHT}:r={rate},format=yuv420p,geq=lum='{pattern}':cb=128:cr=128"
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", "-f", "lavfi", "-i", source, "-frames:v", str(num_frames)]
    done = subprocess.run([*command, *codec, f"file:{path}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"ffmpeg could not make {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return path


def decode_pass(path: str | Path, *, fps: object = 8, short_side: int = 256) -> Iterator[tuple[int, np.ndarray]]:
    """What the frame cache would hold of a file, before JPEG: (pts, RGB uint8 (h, w, 3)), damaged frames included.

    Raises:
        MediaError: the file cannot be used.
    """
    frames = find_stage("frames")
    params = frames.Params.model_validate({"fps": fps, "short_side": short_side})
    pictures: Iterator[tuple[int, np.ndarray]] = frames.pictures(str(path), params)  # type: ignore[attr-defined]
    return pictures


def misbehave(how: str) -> None:
    """What a broken decoder does to its process, for tests of what contains it: ``raise``, ``crash`` (abort), ``hang``,
    or ``allocate`` without end.
    """
    if how == "raise":
        raise ValueError("not a media error")
    if how == "crash":
        os.abort()
    held = []
    while True:
        time.sleep(0.05)
        if how == "allocate":
            held.append(bytearray(os.urandom(1 << 20) * 64))
