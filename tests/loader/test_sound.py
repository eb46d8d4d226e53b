"""Sound through the loader: as long as the frames, where the frames are, nothing from outside the clip, proved bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

import videoflow
from benchmarks.products_audio import HOLE, LOSSLESS, LOSSY, offsets
from tests.jobs import run_job
from videoflow import testing_sync as sync
from videoflow.dataset.catalog import Catalog
from videoflow.errors import BadSample, LoaderError, StateMismatch
from videoflow.recipe import Recipe

RATE = 16_000
STAGES: dict[str, Any] = {"frames": {}, "clips": {"by": "windows", "window_seconds": 2}}
OPTIONS: dict[str, Any] = {"size": 64, "shuffle": False, "epochs": 1, "tail": "pad"}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Noise whose every sample is known, with a hole; a video without sound; version `x` with audio, `mute` without."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "in").mkdir()
    sync.make_sync_video(folder / "in/a.mkv", frames=sync.unsteady(), sound=(0, "5.5"), codec="flac", hole=HOLE)
    picture = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=s=64x64:r=30000/1001:d=5"]
    noise = ["-f", "lavfi", "-i", f"anoisesrc=r={RATE}:d=9:a=0.9:seed=3"]
    coded = ["-c:v", "libx264", "-c:a", "pcm_s16le", "-shortest"]
    subprocess.run([*picture, *noise, *coded, str(folder / "in/b.mov")], check=True)
    subprocess.run([*picture, "-c:v", "libx264", str(folder / "in/c.mp4")], check=True)
    run_job(Recipe(stages={**STAGES, "audio": {}}), [folder / "in"], folder / "cat")
    run_job(Recipe(stages=STAGES), [folder / "in"], folder / "cat", name="mute")
    stages = {**STAGES, "audio": {}, "payload": {"short_side": 64}}
    run_job(Recipe(stages=stages), [folder / "in"], folder / "cat", name="payload")
    return Catalog.open(folder / "cat")


def noise_of(catalog: Catalog) -> np.ndarray:
    path = Path(catalog.root.url).parent / "in/b.mov"
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "s16le", "-"]
    return np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, "<i2").astype(np.float32)


def batches(catalog: Catalog, name: str, *, of: str = "x", **options: Any) -> list[dict[str, Any]]:
    where = {"filter": f"uri LIKE '%{name}'"} if name else {}
    with catalog.version(of).loader(**{**OPTIONS, "audio": True, **where, **options}) as loader:
        return list(loader)


@pytest.mark.parametrize(
    ("frames", "fps", "source"),
    [(16, None, "frames"), (7, 4, "frames"), (1, 1, "frames"), ("1+4k", 8, "frames"), (7, 10, "payload")],
)
def test_samples_are_those_that_ffmpeg_decodes(catalog: Catalog, frames: Any, fps: Any, source: str) -> None:
    """29.97 frames/s: the first delivered frame's pts is no grid time and no sample time. A payload's grid begins with
    its clip, its sound with the video.
    """
    where = {"of": "payload" if source == "payload" else "x", "source": source}
    wanted = noise_of(catalog)
    rows = catalog.version("x").clips(columns=["clip_key", "t1_us"]).to_pylist()
    end = {r["clip_key"]: r["t1_us"] for r in rows}
    seen = 0
    for batch in batches(catalog, "b.mov", batch_size=2, frames=frames, fps=fps, **where):
        num_frames = batch["video"].shape[1]
        num_samples = round(num_frames * RATE / (fps or 8))
        assert batch["audio"].shape == (2, 1, num_samples) and batch["audio_valid"].shape == (2, num_samples)
        for i, key in enumerate(k for k in batch["clip_key"] if k):
            begin, pts = float(batch["audio_start_seconds"][i]), float(batch["pts_seconds"][i, 0])
            assert abs(begin - pts) <= 0.5 / RATE + 1e-12
            first = round(begin * RATE)
            stop = min(first + num_samples, -(-end[key] * RATE // 1_000_000), len(wanted))
            valid = batch["audio_valid"][i].numpy()
            assert abs(int(valid.sum()) - (stop - first)) <= 1 and valid[: valid.sum()].all()
            count = int(valid.sum())
            sound = batch["audio"][i, 0].numpy()
            assert np.array_equal(sound[:count] * 32768, wanted[first : first + count])
            assert not sound[count:].any()
            seen += count
        assert not batch["audio"][len([k for k in batch["clip_key"] if k]) :].any()  # empty slots of the tail
    assert seen > RATE


def test_holes_and_the_end_are_silent_and_not_valid(catalog: Catalog) -> None:
    for batch in batches(catalog, "a.mkv", batch_size=1, frames=16):
        begin = float(batch["audio_start_seconds"][0])
        times = begin + np.arange(batch["audio"].shape[2]) / RATE
        heard = ((times < 2.4) | (times >= 3.6)) & (times < 5.5)
        valid = batch["audio_valid"][0].numpy()
        assert np.array_equal(valid[times < 5.45], heard[times < 5.45]) and not valid[times > 5.6].any()
        assert not batch["audio"][0, 0].numpy()[~valid].any()


def test_a_clip_without_sound_is_silence(catalog: Catalog) -> None:
    for batch in batches(catalog, "c.mp4", batch_size=1, frames=8):
        assert batch["audio"].shape == (1, 1, RATE) and not batch["audio"].any() and not batch["audio_valid"].any()


def test_ranks_and_states_hold(catalog: Catalog) -> None:
    whole = batches(catalog, "", batch_size=4, frames=8, shuffle=True, seed=5)
    parts = [batches(catalog, "", batch_size=4, frames=8, shuffle=True, seed=5, rank=r, world_size=2) for r in (0, 1)]
    for i, batch in enumerate(whole):
        assert np.array_equal(batch["audio"], np.concatenate([p[i]["audio"] for p in parts]))
    version = catalog.version("x")
    with version.loader(batch_size=2, frames=8, audio=True) as a, version.loader(batch_size=2, frames=8) as b:
        next(a)
        with pytest.raises(StateMismatch, match="audio"):
            b.load_state_dict(a.state_dict())
        assert "audio" not in b.state_dict()["config"]  # as states of earlier builds are


def test_a_version_without_audio_says_so(catalog: Catalog) -> None:
    version = catalog.version("mute")
    assert "audio" not in version.clips().column_names
    with pytest.raises(LoaderError, match="add the audio stage"):
        version.loader(batch_size=1, frames=4, audio=True)
    with pytest.raises(LoaderError, match="give fps="):
        catalog.version("payload").loader(batch_size=1, frames=4, audio=True, source="payload")
    with pytest.raises(LoaderError, match="audio="):
        catalog.version("x").loader(batch_size=1, frames=4, audio="yes")


def test_flipped_bytes_are_found_before_they_are_decoded(catalog: Catalog, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "cat"
    shutil.copytree(Path(catalog.root.url), copy)
    version = videoflow.open(copy).version("x")
    (path,) = (copy / "audio").glob("*/part-*.lance")
    rows = lance.dataset(str(path)).to_table(columns=["n"], with_row_id=True).to_pylist()
    ((_, _, blob),) = lance.dataset(str(path)).read_blob_ranges("data", [(rows[0]["_rowid"], 0, 200)], selector="ids")
    needle, changed = bytes(blob)[60:160], 0
    for file in (p for p in path.rglob("*") if p.is_file()):
        data = bytearray(file.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at + 50] ^= 0xFF
            file.write_bytes(data)
            changed += 1
    assert changed == 1
    with (
        version.loader(batch_size=1, frames=8, audio=True, epochs=1, size=64) as loader,
        pytest.raises(BadSample, match=r"clip [0-9a-f]{32}: its sound .* fails its CRC"),
    ):
        list(loader)


def test_flash_and_click_come_together(tmp_path: Path) -> None:
    exact = offsets(tmp_path / "exact", LOSSLESS)
    assert all(len(some) >= 3 for some in exact.values())
    assert max(abs(o) for some in exact.values() for o in some) <= 1
    lossy = offsets(tmp_path / "lossy", LOSSY)
    assert all(len(some) >= 3 for some in lossy.values())
    assert max(abs(o) for some in lossy.values() for o in some) <= RATE // 1000
