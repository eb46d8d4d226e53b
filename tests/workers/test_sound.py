"""Loudness, silence and speech of the cached sound: against FFmpeg's filters, by construction, and on a real voice."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import videoflow
from tests.jobs import run_job
from tests.test_job import facts
from videoflow.dataset.sound import pooled
from videoflow.errors import MissingExtra
from videoflow.recipe import Recipe
from workers import sound
from workers.sound import Sound, SoundParams

RATE = 16_000
STAGES: dict[str, Any] = {"frames": {}, "clips": {"by": "windows", "window_seconds": 2, "min_seconds": 0.1}}
MEASURED = {**STAGES, "audio": {}, "sound": {"use": "workers.sound:Sound", "speech": "off"}}


def voice(seconds: float) -> np.ndarray:
    """A made voice: pulses at 120 Hz that wander, through formants that change four times a second, as syllables do."""
    rng = np.random.default_rng(1)
    n = int(seconds * RATE)
    t = np.arange(n) / RATE
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.7 * t) + 10 * np.sin(2 * np.pi * 3.1 * t)
    phase = np.cumsum(pitch) / RATE
    out = np.zeros(n)
    vowels = [(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)]
    harmonics = range(1, 30)
    for k, begin in enumerate(range(0, n, RATE // 4)):
        span = slice(begin, min(n, begin + RATE // 4))
        formants = vowels[int(rng.integers(len(vowels)))]
        syllable = np.zeros(span.stop - span.start)
        for h in harmonics:
            f = h * float(pitch[span].mean())
            gain = sum(1 / (1 + ((f - c) / w) ** 2) for c, w in zip(formants, (80, 100, 140), strict=True))
            syllable += gain / h**0.5 * np.sin(2 * np.pi * h * phase[span])
        out[span] = syllable * np.sin(np.pi * np.arange(len(syllable)) / len(syllable)) ** 0.5 * (1 if k % 5 else 0.1)
    return (0.5 * out / np.abs(out).max()).astype(np.float32)


def write(path: Path, samples: np.ndarray, *, seconds: int) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    with wave.open(str(path.with_suffix(".wav")), "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(RATE)
        w.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    command = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", f"testsrc2=s=64x64:r=8:d={seconds}"]
    coded = ["-i", str(path.with_suffix(".wav")), "-c:v", "libx264", "-c:a", "pcm_s16le", str(path)]
    subprocess.run([*command, *coded], check=True)
    return path


def as_written(samples: np.ndarray) -> np.ndarray:
    """As 16 bits hold them, float32."""
    return (np.rint(samples * 32767) / 32768).astype(np.float32)


def ffmpeg_loudness(path: Path, begin: float, end: float) -> float:
    """Integrated loudness of [begin, end) s by FFmpeg's ebur128, which looks at the same 400 ms windows."""
    command = ["ffmpeg", "-v", "info", "-nostats", "-ss", str(begin), "-t", str(end - begin), "-i", str(path), "-vn"]
    told = subprocess.run([*command, "-af", "ebur128", "-f", "null", "-"], capture_output=True, text=True, check=True)
    return float(re.findall(r"I:\s+(-?[\d.]+) LUFS", told.stderr)[-1])


@pytest.mark.parametrize("rate", [RATE, 44_100])
@pytest.mark.parametrize("count", [1, 1599, 1600, 1605, 14_924, 16_384, 40_001])
@pytest.mark.parametrize("piece", [100, 7_001, 100_000])
def test_sound_of_any_length_in_any_pieces(rate: int, count: int, piece: int) -> None:
    """Real files end anywhere. What is measured of them is the beginning of what is measured of a longer file."""
    step, whole = rate // 10, np.random.default_rng(2).uniform(-0.5, 0.5, (1, 5 * rate)).astype(np.float32)
    whole[:, count:] = 0
    found = []
    for samples, by in ((whole[:, :count], piece), (whole, rate)):
        loudness, levels = sound.Loudness(rate, 1), sound.Levels(rate)
        for at in range(0, samples.shape[1], by):
            some = samples[:, at : at + by]
            loudness.add(some)
            levels.add(some, np.ones(some.shape[1], bool))
        found.append((loudness.end(), levels.end()))
    (short, short_levels), (long, long_levels) = found
    assert len(short) == count // step and np.allclose(short, long[: count // step], atol=0.1)
    steps = -(-count // step)
    assert short_levels["peak"] == long_levels["peak"][:steps] and len(short_levels["peak"]) == steps
    assert sum(short_levels["heard"]) == count


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Ten seconds: a tone of -23 dBFS, the same 20 dB lower, silence, noise, noise and silence in turns; and a mute video."""
    folder = tmp_path_factory.mktemp("scores")
    t = np.arange(2 * RATE) / RATE
    tone = np.sin(2 * np.pi * 1000 * t)
    noise = np.random.default_rng(5).normal(0, 0.1, 2 * RATE).clip(-1, 1)
    turns = noise * (np.arange(2 * RATE) // (RATE // 2) % 2)
    parts = [tone * 10 ** (-23 / 20), tone * 10 ** (-43 / 20), np.zeros(2 * RATE), noise, turns]
    write(folder / "in/a.mkv", np.concatenate(parts).astype(np.float32), seconds=10)
    mute = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=s=64x64:r=8:d=2", "-c:v", "libx264"]
    subprocess.run([*mute, str(folder / "in/mute.mp4")], check=True)
    (folder / "in/a.wav").unlink()
    run_job(Recipe(stages=MEASURED), [folder / "in"], folder / "cat")
    rows = videoflow.open(folder / "cat").version("x").clips().to_pylist()
    return folder, sorted((r for r in rows if "a.mkv" in r["uri"]), key=lambda r: r["t0_us"])


def test_loudness_is_that_of_ffmpeg_for_every_cut(measured: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = measured
    assert [r["t0_us"] // 1_000_000 for r in rows] == [0, 2, 4, 6, 8]
    for row in rows:
        begin, end = row["t0_us"] / 1e6, row["t1_us"] / 1e6
        wanted = ffmpeg_loudness(folder / "in/a.mkv", begin, end)
        if begin == 4:
            assert row["sound_loudness"] is None and wanted == -70.0  # nothing passes the gate
        else:
            assert abs(row["sound_loudness"] - wanted) <= 0.15
    # A sine of one channel: its mean square, K-weighted at 1 kHz, is its loudness. Source: ITU-R BS.1770-4.
    assert abs(rows[0]["sound_loudness"] - (-23 - 10 * math.log10(2))) < 0.1
    assert abs(rows[0]["sound_loudness"] - rows[1]["sound_loudness"] - 20) < 0.1


def test_silence_is_the_share_of_silent_steps(measured: tuple[Path, list[dict[str, Any]]]) -> None:
    _, rows = measured
    assert [r["sound_silence"] for r in rows] == [0, 0, 1, 0, 0.5]
    assert all(r["sound_speech"] is None for r in rows)  # speech: off


def test_a_video_without_sound_has_no_scores_and_new_cuts_read_no_source(
    measured: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, _ = measured
    version = videoflow.open(folder / "cat").version("x")
    (mute,) = version.clips(filter="uri LIKE '%mute.mp4'").to_pylist()
    assert mute["sound_loudness"] is None and mute["sound_silence"] is None
    again = run_job(Recipe(stages=MEASURED).with_settings(["clips.window_seconds=1"]), [folder / "in"], folder / "cat")
    assert (again.decoded_videos, again.heard_videos, again.stages.get("sound")) == (0, 0, None)
    rows = videoflow.open(folder / "cat").version("x").clips(filter="uri LIKE '%a.mkv'").to_pylist()
    assert [r["sound_silence"] for r in sorted(rows, key=lambda r: r["t0_us"])] == [0, 0, 0, 0, 1, 1, 0, 0, 0.5, 0.5]


def test_measuring_later_opens_no_source_and_gives_the_same(
    measured: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = measured
    less = Recipe(stages={k: v for k, v in MEASURED.items() if k != "sound"})
    run_job(less, [folder / "in"], tmp_path / "cat")
    later = run_job(Recipe(stages=MEASURED), [folder / "in"], tmp_path / "cat")
    assert (later.decoded_videos, later.heard_videos) == (0, 0)
    sound_facts = {k: v for k, v in facts(tmp_path / "cat").items() if k[0] in ("audio", "sound")}
    assert sound_facts and sound_facts.items() <= facts(folder / "cat").items()


def test_pooling_keeps_to_the_clip() -> None:
    """Windows of 400 ms that reach over an edge, and steps that do, are no part of a clip."""
    clip = {"t0_pts": 1550, "t1_pts": 2550, "tb_num": 1, "tb_den": 1000, "start_pts": 500}  # [1.05, 2.05) s
    row = {"loudness": [-90.0] * 14 + [-20.0] * 6 + [-90.0] * 9, "peak": [0] * 11 + [999] * 9 + [0] * 9, "speech": None}
    scores = pooled(clip, row)
    assert scores["loudness"] == pytest.approx(-20.0) and scores["silence"] == 0 and scores["speech"] is None
    row["speech"] = [0.9 if 33 <= j < 49 else 0.1 for j in range(100)]  # windows 33 … 63 lie in the clip
    assert pooled(clip, row)["speech"] == 16 / 31


def test_the_voice_detector_hears_a_voice_and_not_noise(tmp_path: Path) -> None:
    if importlib.util.find_spec("silero_vad") is None:
        pytest.skip("extra speech is not installed")
    quiet = np.random.default_rng(2).normal(0, 0.02, 4 * RATE).astype(np.float32)
    samples = np.concatenate([quiet, voice(4)])
    write(tmp_path / "in/a.mkv", samples, seconds=8)
    (tmp_path / "in/a.wav").unlink()
    stages = {**STAGES, "audio": {"rate": 16000}, "sound": {"use": "workers.sound:Sound"}}
    run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat")
    rows = videoflow.open(tmp_path / "cat").version("x").clips().to_pylist()
    speech = [r["sound_speech"] for r in sorted(rows, key=lambda r: r["t0_us"])]
    assert max(speech[:2]) < 0.1 and sum(speech[2:]) / 2 > 0.5
    import torch

    vad, probabilities = torch.jit.load(str(sound.vad_weights())), []  # the detector itself, straight over the samples
    for window in torch.from_numpy(as_written(samples)).split(512):
        padded = torch.nn.functional.pad(window, (0, 512 - len(window)))
        with torch.inference_mode():
            probabilities.append(float(vad(padded[None], RATE)))
    for i, share in enumerate(speech):
        first, stop = math.ceil(i * 2 * RATE / 512), math.floor((i + 1) * 2 * RATE / 512)
        wanted = [p >= 0.5 for p in probabilities[first:stop]]
        assert share == pytest.approx(sum(wanted) / len(wanted), abs=1 / len(wanted))


def test_without_its_package_the_detector_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sound.importlib.util.find_spec
    monkeypatch.setattr(sound.importlib.util, "find_spec", lambda n: None if n == "silero_vad" else real(n))
    assert Sound.resolve(SoundParams()).speech == "off"
    with pytest.raises(MissingExtra, match=r"videoflow\[speech\]"):
        Sound(SoundParams(speech="silero")).identity()


def test_log_mel_is_whispers(tmp_path: Path) -> None:
    """Against Whisper's own feature extractor; rows of 100 spectra, so that joints are looked at too."""
    transformers = pytest.importorskip("transformers")
    lance = pytest.importorskip("lance")
    samples = np.concatenate([voice(2), np.random.default_rng(3).normal(0, 0.05, RATE + 77).astype(np.float32)])
    write(tmp_path / "in/a.mkv", samples, seconds=4)
    (tmp_path / "in/a.wav").unlink()
    stages = {**STAGES, "audio": {}, "mel": {"use": "workers.logmel:LogMel", "row_steps": 100}}
    summary = run_job(Recipe(stages=stages), [tmp_path / "in"], tmp_path / "cat")
    assert summary.done == 1
    (path,) = (tmp_path / "cat/logmel").glob("*/part-*.lance")
    dataset = lance.dataset(str(path))
    rows = dataset.to_table(columns=["first_step", "n", "bins"], with_row_id=True).to_pylist()
    rows.sort(key=lambda r: r["first_step"])
    assert [(r["first_step"], r["n"]) for r in rows] == [(0, 100), (100, 100), (200, 100), (300, 1)]
    blobs = [dataset.take_blobs("data", ids=[r["_rowid"]])[0].readall() for r in rows]
    found = np.concatenate([np.frombuffer(b, "<f2").reshape(-1, 80) for b in blobs]).astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor()
    whole = extractor(as_written(samples), sampling_rate=RATE, return_tensors="np")["input_features"][0].T
    wanted = whole[: len(found)] * 4 - 4  # as its normalisation leaves what is less than 8 below the maximum
    inner = slice(2, 299)  # at the very edges Whisper mirrors the sound, here it is silence
    kept = wanted[inner] > wanted.max() - 7.9
    assert kept.mean() > 0.8
    assert np.abs(found[inner] - wanted[inner])[kept].max() < 0.02
