"""How far sound is from its picture after the whole way: made videos with a flash and a click at the same instant.

They go through a run, the audio cache, a version and the loader. `benchmarks/products.py` takes its figure from here.

    python -m benchmarks.products_audio --json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import videoflow
from videoflow import testing_sync as sync
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.recipe import Recipe

FRAMES_PER_SECOND, RATE = 8, 16_000
HOLE = ("2.4", "3.6")
#: What is made, by file name; each as `videoflow.testing_sync.make_sync_video` takes it. Lossless sound.
LOSSLESS: dict[str, dict[str, Any]] = {
    "cfr.mov": {"frames": sync.steady(30), "sound": (0, 6)},
    "cfr_44k.mov": {"frames": sync.steady(30), "sound": (0, 6), "rate": 44_100},
    "vfr.mkv": {"frames": sync.unsteady(), "sound": (0, 6), "codec": "flac"},
    "late.mov": {"frames": sync.steady(25, first=10), "sound": (10, 16)},
    "before_zero.mov": {"frames": sync.steady(30, first=1), "sound": ("0.3", 7)},
    "hole.mkv": {"frames": sync.steady(30), "sound": (0, 6), "codec": "flac", "hole": HOLE},
}
LOSSY: dict[str, dict[str, Any]] = {
    "aac_cfr.mp4": {"frames": sync.steady(30), "sound": (0, 6), "codec": "aac"},
    "aac_vfr_hole.mp4": {"frames": sync.unsteady(), "sound": (0, 6), "codec": "aac", "hole": HOLE},
    "aac_before_zero.mp4": {"frames": sync.steady(30, first="0.5"), "sound": ("0.3", 6), "codec": "aac"},
    "opus_hole.mkv": {"frames": sync.steady(30), "sound": (0, 6), "codec": "libopus", "hole": HOLE},
    "opus_before_zero.mkv": {"frames": sync.steady(30, first="0.5"), "sound": ("0.3", 6), "codec": "libopus"},
}


class _Silent:
    """Progress that says nothing."""

    def begin(self, stage: str, total: int, unit: str) -> None: ...

    def advance(self, stage: str, report: object) -> None: ...

    def note(self, message: str) -> None: ...


def offsets(folder: Path, videos: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """By file: how many audio samples each click is behind its flash, as the loader delivers both."""
    source, root = folder / "in", str(folder / "catalog")
    source.mkdir(parents=True)
    for name, how in videos.items():
        sync.make_sync_video(source / name, **how)
    clips = {"by": "windows", "window_seconds": 2, "min_seconds": 0.1}
    recipe = Recipe(stages={"frames": {"fps": FRAMES_PER_SECOND}, "clips": clips, "audio": {"rate": RATE}})
    Job(recipe, [str(source)], root=root, name="sync", options=JobOptions("local", workers=1), progress=_Silent()).run()
    version = videoflow.open(root).version("sync")
    names = {r["clip_key"]: Path(r["uri"]).name for r in version.clips(columns=["clip_key", "uri"]).to_pylist()}
    found: dict[str, list[int]] = {name: [] for name in videos}
    options: dict[str, Any] = {"frames": "1+1k", "size": 64, "shuffle": False, "epochs": 1, "tail": "pad"}
    with version.loader(batch_size=1, audio=True, **options) as loader:
        for batch in loader:
            found[names[batch["clip_key"][0]]] += batch_offsets(batch)
    return found


def batch_offsets(batch: dict[str, Any]) -> list[int]:
    """Offsets of the clicks of a batch of one clip; clicks that are cut by its edge are left out."""
    shown = {}
    for picture, pts, valid in zip(batch["video"][0], batch["pts_seconds"][0], batch["frame_valid"][0], strict=True):
        if valid and float(picture.float().mean()) > 125:
            shown[float(pts)] = True
    sound = np.abs(batch["audio"][0, 0].numpy())
    found, reach = [], RATE // 20
    for pts in shown:
        at = round((pts - float(batch["audio_start_seconds"][0])) * RATE)
        window = sound[max(0, at - reach) : at + reach]
        whole = bool(batch["audio_valid"][0, max(0, at - reach) : at + reach].all())
        if whole and window.max() > 0.4:
            found.append(int(window.argmax()) + max(0, at - reach) - at)
    return found


def measure(folder: str | Path | None = None) -> dict[str, Any]:
    """``av_offset_samples_max``: of lossless sources, in audio samples at 16 kHz; and of lossy ones beside it."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        lossless = offsets(Path(made) / "lossless", LOSSLESS)
        lossy = offsets(Path(made) / "lossy", LOSSY)
    clicks = [o for each in (lossless, lossy) for some in each.values() for o in some]
    if any(len(some) < 3 for each in (lossless, lossy) for some in each.values()):
        raise RuntimeError(f"too few clicks came through: {lossless} {lossy}")
    return {
        "av_offset_samples_max": max(abs(o) for some in lossless.values() for o in some),
        "av_offset_samples_max_lossy": max(abs(o) for some in lossy.values() for o in some),
        "av_clicks": len(clicks),
        "av_rate": RATE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    measured = measure()
    if asked.json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
