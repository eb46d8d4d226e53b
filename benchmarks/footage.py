"""The videos of the ingest benchmark: 720p H.264 by x264's defaults at 24 frames/s, of real pictures, always the same.

One piece of about twenty seconds is encoded once; longer videos repeat it without encoding again. Its pictures are the
sample clips of the demo (Big Buck Bunny, a street full of bikes); where they cannot be downloaded, the hard files.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from fractions import Fraction
from math import ceil
from pathlib import Path

import av

from pipelines.demo import sample_videos
from videoflow.errors import InputError, SourceError

FPS = 24
CACHE = Path(tempfile.gettempdir()) / "videoflow-bench"
REPOSITORY = Path(__file__).resolve().parent.parent
#: Fills 1280 × 720 with the middle of a wider picture, at the picture's own frames, whatever their times.
_FILL = "scale=1280:720:force_original_aspect_ratio=increase:flags=lanczos,crop=1280:720,setsar=1,format=yuv420p"


def corpus() -> Path:
    """Folder of the hard files."""
    return Path(os.environ.get("VIDEOFLOW_CORPUS") or REPOSITORY.parent / "shared" / "videos")


def pictures(cache: Path) -> list[Path]:
    """The files whose pictures are taken, in order.

    Raises:
        SourceError: neither the sample clips nor the hard files are to be had.
    """
    try:
        folder = sample_videos(cache)
        return [folder / "bigbuckbunny.mp4", folder / "bikes.mp4"]
    except SourceError:
        found = [corpus() / name for name in ("vp8_vorbis.webm", "cuts_bikes.mp4")]
        if all(p.is_file() for p in found):
            return found
        raise


def piece(cache: Path = CACHE) -> Path:
    """The first file, the second, the first mirrored: one after the other, at 24 frames/s."""
    path = cache / "piece.mp4"
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    first, second = pictures(cache)
    graph = f"[0:v:0]{_FILL},split=2[a][b];[b]hflip[m];[1:v:0]{_FILL}[s];[a][s][m]concat=n=3:v=1,setpts=N/{FPS}/TB[out]"
    options = ["-map", "[out]", "-r", str(FPS), "-fps_mode", "passthrough", "-c:v", "libx264", "-an"]
    _ffmpeg(["-i", str(first), "-i", str(second), "-filter_complex", graph, *options], path)
    return path


def folder_of(name: str, *, seconds: float, cache: Path = CACHE) -> Path:
    """A folder ``name`` with one video of at least this many seconds (a multiple of the piece, or its beginning)."""
    path = cache / name / "video.mp4"
    if path.is_file():
        return path.parent
    path.parent.mkdir(parents=True, exist_ok=True)
    source = piece(cache)
    length = Fraction(num_frames(source), FPS)
    if seconds < length:
        _ffmpeg(["-i", str(source), "-frames:v", str(int(seconds * FPS)), "-c:v", "libx264"], path)
        return path.parent
    listed = path.with_suffix(".txt")
    # Told its length, FFmpeg puts the next copy exactly one frame after the last frame of this one.
    listed.write_text(f"file '{source}'\nduration {float(length):.6f}\n" * ceil(seconds / length))
    _ffmpeg(["-f", "concat", "-safe", "0", "-i", str(listed), "-c", "copy"], path)
    return path.parent


def num_frames(path: Path) -> int:
    """Frames as the container counts them (these videos are made here: it is right)."""
    with av.open(str(path)) as container:
        return int(container.streams.video[0].frames)


def _ffmpeg(arguments: list[str], path: Path) -> None:
    part = path.with_name(f"part-{path.name}")
    done = subprocess.run(["ffmpeg", "-v", "error", "-nostdin", "-y", *arguments, str(part)], check=False)
    if done.returncode:
        raise InputError(f"ffmpeg could not make {path}")
    part.rename(path)
