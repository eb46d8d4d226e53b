"""The audio cache: clicks lie where the flashes are, to the sample; what the pass makes of holes, damage and nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
import simplejpeg

from tests.jobs import run_job
from tests.test_job import facts
from tests.test_split import make
from videoflow import testing_sync as sync
from videoflow.errors import MediaError, RecipeError
from videoflow.keys import digest_bytes
from videoflow.media.sound import as_int16, decode_run, encode_flac, encode_opus
from videoflow.recipe import Recipe
from videoflow.stage import VideoHeader
from videoflow.store.blobs import iter_records
from workers import hear
from workers.audio import Audio, AudioParams
from workers.decode import run_pass
from workers.frames import Frames

CHEAP = {"frames": {}, "clips": {"by": "windows", "window_seconds": 2}}
HOLE = ("2.4", "3.6")
#: Name, how the video is made, how many audio samples at 16 kHz an instant may be off.
MADE: dict[str, tuple[dict[str, Any], int]] = {
    "cfr.mov": ({"frames": sync.steady(30), "sound": (0, 6)}, 1),
    "cfr_44k.mov": ({"frames": sync.steady(30), "sound": (0, 6), "rate": 44100, "channels": 2}, 1),
    "vfr.mkv": ({"frames": sync.unsteady(), "sound": (0, 6), "codec": "flac"}, 1),
    "late.mov": ({"frames": sync.steady(25, first=10, seconds=4), "sound": (10, 14)}, 1),
    "before_zero.mov": ({"frames": sync.steady(30, first=1, seconds=5), "sound": ("0.3", 6)}, 1),
    "hole.mkv": ({"frames": sync.steady(30), "sound": (0, 6), "codec": "flac", "hole": HOLE}, 1),
    "aac_44k_hole.mkv": (
        {"frames": sync.steady(30), "sound": (0, 6), "codec": "aac", "rate": 44100, "hole": ("2.407", "3.6123")}, 16
    ),
    "pcm_hole.mkv": ({"frames": sync.unsteady(), "sound": (0, 6), "hole": HOLE}, 1),
    "aac.mp4": ({"frames": sync.steady(30), "sound": (0, 6), "codec": "aac"}, 16),
    "aac_vfr.mp4": ({"frames": sync.unsteady(), "sound": (0, 6), "codec": "aac"}, 16),
    "aac_late.mp4": ({"frames": sync.steady(25, first=10, seconds=5), "sound": ("10.25", 15), "codec": "aac"}, 16),
    "aac_before_zero.mp4": (
        {"frames": sync.steady(30, first="0.5"), "sound": ("0.3", 6), "codec": "aac"}, 16
    ),
    "aac_hole.mp4": ({"frames": sync.steady(30), "sound": (0, 6), "codec": "aac", "hole": HOLE}, 16),
    "opus_vfr.mkv": ({"frames": sync.unsteady(), "sound": (0, 6), "codec": "libopus"}, 16),
    "opus_before_zero.mkv": (
        {"frames": sync.steady(30, first="0.5"), "sound": ("0.3", 6), "codec": "libopus"}, 16
    ),
    "opus_hole.mkv": ({"frames": sync.steady(30), "sound": (0, 6), "codec": "libopus", "hole": HOLE}, 16),
}  # fmt: skip


def passed(path: Path, *consumers: Any, header: VideoHeader | None = None) -> tuple[dict[str, list[dict]], Any]:
    rows: dict[str, list[dict]] = {c.name: [] for c in consumers}
    result = run_pass(
        path, video_key="v" * 32, consumers=consumers, sink=lambda name, row: rows[name].append(row), header=header
    )
    return rows, result


def runs_of(rows: list[dict]) -> Iterator[tuple[int, np.ndarray]]:
    for row in rows:
        assert digest_bytes(row["data"]) == row["digest"]
        records = list(iter_records(row["data"]))
        assert [r.pts for r in records] == row["first_samples"] and row["first_sample"] == row["first_samples"][0]
        for record, count in zip(records, row["counts"], strict=True):
            samples, rate = decode_run(record.payload)
            assert samples.shape == (row["channels"], count) and rate == row["rate"]
            assert row["chunk"] == record.pts // (4 * rate) == (record.pts + count - 1) // (4 * rate)
            yield record.pts, samples
        assert row["n"] == sum(row["counts"])


def line(rows: list[dict], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples of the first channel, which were heard), silence where nothing was."""
    values, heard = np.zeros(length, np.float32), np.zeros(length, bool)
    for first, samples in runs_of(rows):
        stop = min(length, first + samples.shape[1])
        assert not heard[first:stop].any()
        values[first:stop], heard[first:stop] = samples[0, : stop - first], True
    return values, heard


def flashes(rows: list[dict]) -> list[int]:
    """pts of the white pictures in the frame cache."""
    records = [record for row in rows for record in iter_records(row["data"])]
    return [r.pts for r in records if simplejpeg.decode_jpeg(bytes(r.payload)).mean() > 125]


def click_near(values: np.ndarray, at: int) -> int | None:
    """Where the click near a sample has its peak; None if there is none."""
    low = max(0, at - 800)
    window = np.abs(values[low : at + 800])
    return low + int(window.argmax()) if len(window) and window.max() > 0.4 else None


@pytest.mark.parametrize("name", MADE)
def test_clicks_lie_where_the_flashes_are(tmp_path: Path, name: str) -> None:
    how, allowed = MADE[name]
    path = sync.make_sync_video(tmp_path / name, **how)
    rows, result = passed(path, Frames(), Audio())
    assert not result.failures
    time_base, start = result.facts.decoder.time_base, result.facts.decoder.tally.pts[0]
    values, heard = line(rows["audio"], 6 * 16_000)
    offsets, silent = [], []
    for pts in flashes(rows["frames"]):
        at = (pts - start) * time_base * 16_000
        assert at.denominator == 1
        click = click_near(values, int(at))
        if click is None:
            silent.append(pts * time_base)
        else:
            offsets.append(click - int(at))
    assert silent == ([3] if "hole" in how else [10] if "10.25" in how["sound"] else [])
    assert len(offsets) >= 4 and max(map(abs, offsets)) <= allowed
    if "hole" in how:  # a coder's last frame before the hole may reach a little into it
        assert heard[: int(2.39 * 16_000)].all() and not heard[int(2.47 * 16_000) : int(3.58 * 16_000)].any()
        assert heard[int(3.62 * 16_000) : int(5.9 * 16_000)].all()


def test_sound_of_the_same_rate_is_stored_to_the_bit(tmp_path: Path) -> None:
    """16-bit stereo at the cache's rate, over the joint of two chunks: what FFmpeg's own decode of the source gives."""
    path = make(tmp_path / "in/a.mkv", "-c:v", "libx264", source="testsrc2=s=64x64:r=10:d=9")
    path = with_sound(path, "anoisesrc=r=48000:d=9:a=0.9:seed=7,aformat=channel_layouts=stereo", "-c:a", "pcm_s16le")
    rows, _ = passed(path, Audio(AudioParams(rate=48000, channels=2)))
    stored = np.concatenate([as_int16(samples) for _, samples in runs_of(rows["audio"])], axis=1)
    assert [(r["chunk"], r["first_sample"], r["n"]) for r in rows["audio"]] == [
        (0, 0, 192_000), (1, 192_000, 192_000), (2, 384_000, 48_000)
    ]  # fmt: skip
    assert np.array_equal(stored, ffmpeg_pcm(path, rate=48000, channels=2))


def with_sound(video: Path, source: str, *codec: str) -> Path:
    out = video.with_name(f"sound_{video.name}")
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", "-i", str(video), "-f", "lavfi", "-i", source]
    subprocess.run([*command, "-map", "0:v:0", "-map", "1:a:0", "-c:v", "copy", *codec, str(out)], check=True)
    video.unlink()
    return out


def ffmpeg_pcm(path: Path, *, rate: int, channels: int, stream: str = "0:a:0") -> np.ndarray:
    """FFmpeg's own decode: int16 (channels, n)."""
    command = ["ffmpeg", "-v", "error", "-nostdin", "-threads", "1", "-i", str(path), "-map", stream]
    form = ["-ac", str(channels), "-ar", str(rate), "-f", "s16le", "-"]
    out = subprocess.run([*command, *form], capture_output=True, check=True).stdout
    return np.frombuffer(out, "<i2").reshape(-1, channels).T


@pytest.mark.parametrize("count", [1, 15, 319, 960, 5000, 192_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_run_decodes_to_exactly_its_samples(count: int, channels: int) -> None:
    t = np.arange(count * channels).reshape(channels, count)
    samples = (0.5 * np.sin(t * 0.03)).astype(np.float32)
    exact, rate = decode_run(encode_flac(as_int16(samples), 16_000))
    assert rate == 16_000 and np.array_equal(as_int16(exact), as_int16(samples))
    samples[:, count // 2] = 0.99
    lossy, rate = decode_run(encode_opus(samples, bit_rate=96_000 * channels))
    assert rate == 48_000 and lossy.shape == samples.shape
    if count >= 5000:
        assert abs(int(np.abs(lossy[0]).argmax()) - count // 2) <= 1


def test_opus_is_at_48_khz_and_keeps_every_sample_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="48000"):
        Recipe(stages={"audio": {"codec": "opus"}}).build()
    path = sync.make_sync_video(tmp_path / "a.mov", frames=sync.steady(30, seconds=9), sound=(0, 9))
    rows, _ = passed(path, Audio(AudioParams(rate=48000, codec="opus")))
    values, heard = line(rows["audio"], 9 * 48_000)
    assert heard.all()
    for second in range(9):
        assert abs((click_near(values, second * 48_000) or -1000) - second * 48_000) <= 48


def test_a_pass_for_sound_alone_decodes_no_picture_and_gives_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    path = sync.make_sync_video(tmp_path / "a.mkv", frames=sync.unsteady(first=2), sound=(1, 8), codec="flac")
    both, whole = passed(path, Frames(), Audio())
    decoder = whole.facts.decoder
    header = VideoHeader("v" * 32, decoder.stream.index, decoder.time_base, decoder.tally.pts[0])
    monkeypatch.setattr("workers.decode.open_decoder", None)  # nobody may open the video stream
    alone, result = passed(path, Audio(), header=header)
    assert result.summary.num_frames == 0
    assert alone["audio"] == both["audio"] and len(both["audio"]) == 2
    assert result.products["audio"].digest == whole.products["audio"].digest


def test_sound_that_lies_before_all_pictures_is_read_afterwards(tmp_path: Path, monkeypatch: Any) -> None:
    path = sync.make_sync_video(tmp_path / "a.mkv", frames=sync.steady(30, first=3), sound=(0, 9), codec="flac")
    usual, _ = passed(path, Frames(), Audio())
    monkeypatch.setattr(hear, "MAX_WAITING_BYTES", 100)
    late, _ = passed(path, Frames(), Audio())
    assert late == usual and len(usual["audio"]) == 2


def test_a_video_without_audio_has_no_rows(tmp_path: Path) -> None:
    path = make(tmp_path / "in/a.mp4", "-c:v", "libx264", source="testsrc2=s=64x64:r=10:d=1")
    rows, result = passed(
        path,
        Frames(),
        Audio(),
    )
    assert rows["audio"] == [] and not result.failures and result.products["audio"].digest
    other, result = passed(sync.make_sync_video(tmp_path / "b.mov", frames=sync.steady(30), sound=(0, 6)),
                           Audio(AudioParams(stream=7)))  # fmt: skip
    assert other["audio"] == [] and not result.failures


def test_another_stream_is_heard_by_its_index(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    sources = ["testsrc2=s=64x64:r=10:d=2", "sine=f=300:r=16000:d=2", "sine=f=900:r=16000:d=2"]
    command = ["ffmpeg", "-v", "error", "-y", *[w for s in sources for w in ("-f", "lavfi", "-i", s)]]
    maps = ["-map", "0", "-map", "1", "-map", "2", "-c:v", "libx264", "-c:a", "flac"]
    subprocess.run([*command, *maps, str(path)], check=True)
    for stream, tone in ((None, 300), (1, 300), (2, 900)):
        rows, _ = passed(path, Audio(AudioParams(stream=stream)))
        values, _ = line(rows["audio"], 32_000)
        assert abs(np.abs(np.fft.rfft(values)).argmax() / 2 - tone) < 1
        assert {r["audio_stream"] for r in rows["audio"]} == {stream or 1}


def damaged(path: Path, *, first: int, last: int) -> Path:
    """The same file with the bytes of some audio packets overwritten."""
    import av

    with av.open(str(path)) as container:
        places = [(p.pos, p.size) for p in container.demux(audio=0) if p.size]
    data = bytearray(path.read_bytes())
    for pos, size in places[first:last]:
        data[pos : pos + size] = b"\xff" * size
    out = path.with_name(f"damaged_{path.name}")
    out.write_bytes(data)
    return out


def test_damaged_sound_is_marked_and_the_rest_stays_in_place(tmp_path: Path) -> None:
    whole = sync.make_sync_video(tmp_path / "a.mp4", frames=sync.steady(30), sound=(0, 6), codec="aac")
    path = damaged(whole, first=100, last=140)  # 2.13 … 2.99 s
    rows, result = passed(path, Frames(), Audio())
    clean, _ = passed(whole, Frames(), Audio())
    assert not result.failures and rows["frames"] == clean["frames"]
    assert sum(r["failed_packets"] for r in rows["audio"]) >= 30
    values, heard = line(rows["audio"], 96_000)
    assert not heard[int(2.2 * 16_000) : int(2.9 * 16_000)].all()
    for second in (1, 2, 4, 5):
        assert abs((click_near(values, second * 16_000) or -1000) - second * 16_000) <= 16


def test_sound_that_cannot_be_decoded_at_all_fails_alone(tmp_path: Path) -> None:
    whole = sync.make_sync_video(tmp_path / "a.mp4", frames=sync.steady(30), sound=(0, 6), codec="aac")
    rows, result = passed(damaged(whole, first=0, last=10_000), Frames(), Audio())
    assert rows["audio"] == [] and len(rows["frames"]) == 2
    assert isinstance(result.failures["audio"], MediaError) and result.failures["audio"].code == "truncated"


# -- through jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    sync.make_sync_video(tmp_path / "in/a.mkv", frames=sync.unsteady(), sound=(0, 6), codec="flac", hole=HOLE)
    sync.make_sync_video(tmp_path / "in/b.mp4", frames=sync.steady(25, first=1), sound=("0.3", 7), codec="aac")
    make(tmp_path / "in/mute.mp4", "-c:v", "libx264", source="testsrc2=s=64x64:r=10:d=3")
    return tmp_path / "in"


def stored_audio(root: Path) -> list[dict]:
    (part,) = (root / "audio").glob("*/part-*.lance")
    dataset = lance.dataset(str(part))
    rows = dataset.to_table(columns=[n for n in dataset.schema.names if n != "data"], with_row_id=True).to_pylist()
    for row in rows:
        row_id = row.pop("_rowid")
        ((_, _, data),) = dataset.read_blob_ranges("data", [(row_id, 0, row["offsets"][-1])], selector="ids")
        row["data"] = bytes(data)
        assert digest_bytes(row["data"]) == row["digest"]
    return sorted(rows, key=lambda r: (r["item_key"], r["chunk"]))


def test_one_pass_serves_all_and_sound_that_is_added_later_decodes_no_picture(folder: Path, tmp_path: Path) -> None:
    full = Recipe(stages={**CHEAP, "shots": {}, "quality": {}, "audio": {}})
    one = run_job(full, [folder], tmp_path / "one")
    assert (one.decoded_videos, one.heard_videos, one.done) == (3, 0, 3) and one.frames_decoded > 250
    less = Recipe(stages={k: v for k, v in full.stages.items() if k != "audio"})
    before = run_job(less, [folder], tmp_path / "two")
    assert (before.decoded_videos, before.frames_decoded) == (3, one.frames_decoded)
    after = run_job(full, [folder], tmp_path / "two")
    assert (after.decoded_videos, after.frames_decoded, after.heard_videos, after.done) == (0, 0, 3, 3)
    assert facts(tmp_path / "two") == facts(tmp_path / "one")
    assert stored_audio(tmp_path / "two") == stored_audio(tmp_path / "one")
    again = run_job(full, [folder], tmp_path / "two")
    assert (again.decoded_videos, again.heard_videos, again.version) == (0, 0, after.version)
    other = run_job(full.with_settings(["audio.rate=24000"]), [folder], tmp_path / "two")
    assert (other.decoded_videos, other.heard_videos) == (0, 3)


@pytest.mark.parametrize("point", ["after-write@audio", "before-stage@audio", "after-swap@audio"])
def test_a_killed_run_is_picked_up(folder: Path, tmp_path: Path, point: str) -> None:
    """Sound is added to videos that are there; the job is killed at a step of its commit, and started again."""
    full, root = Recipe(stages={**CHEAP, "audio": {}}), tmp_path / "cat"
    run_job(full, [folder], tmp_path / "whole")
    run_job(Recipe(stages=CHEAP), [folder], root)
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": full.stages}))
    arguments = ["run", str(tmp_path / "recipe.yaml"), "--source", str(folder), "--root", str(root), "--name", "x"]
    command = [sys.executable, "-m", "tests.killed_run", point, "1", "SIGKILL", *arguments]
    done = subprocess.run([*command, "--engine", "local", "--workers", "1"], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    resumed = run_job(full, [folder], root)
    assert (resumed.decoded_videos, resumed.frames_decoded, resumed.done) == (0, 0, 3)
    assert 0 < resumed.heard_videos <= 3
    assert facts(root) == facts(tmp_path / "whole")
    assert rows_by_key(root) == rows_by_key(tmp_path / "whole")


def rows_by_key(root: Path) -> list[tuple[str, int, str]]:
    """What the audio table's rows say, over all its fragments; a double would be one more."""
    (part,) = (root / "audio").glob("*/part-*.lance")
    rows = lance.dataset(str(part)).to_table(columns=["item_key", "chunk", "digest"]).to_pylist()
    return sorted((r["item_key"], r["chunk"], r["digest"]) for r in rows)


def test_ray_hears_the_same(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(stages={**CHEAP, "audio": {}})
    run_job(recipe, [folder], tmp_path / "local")
    summary = run_job(recipe, [folder], tmp_path / "ray", engine="ray", workers=2)
    assert (summary.decoded_videos, summary.done) == (3, 3)
    assert facts(tmp_path / "ray") == facts(tmp_path / "local")
    assert stored_audio(tmp_path / "ray") == stored_audio(tmp_path / "local")


def test_a_silent_video_is_done_and_broken_sound_is_its_own_end(folder: Path, tmp_path: Path) -> None:
    damaged(folder / "b.mp4", first=0, last=10_000)
    summary = run_job(Recipe(stages={**CHEAP, "audio": {}}), [folder], tmp_path / "cat")
    states = lance.dataset(str(tmp_path / "cat/ledger.lance")).to_table().to_pylist()
    ends = sorted((r["stage"], r["state"], r["rows"]) for r in states if r["stage"] in ("audio", "frames"))
    assert [e[1] for e in ends] == ["done", "done", "done", "quarantined", "done", "done", "done", "done"]
    assert 0 in {e[2] for e in ends if e[:2] == ("audio", "done")}  # nothing to hear is an answer
    assert summary.clips and summary.version == "x@1"
