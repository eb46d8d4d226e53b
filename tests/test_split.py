"""Long videos cut between workers: the same results by every digest and row, or no cut at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import lance
import pytest

from tests.jobs import run_job
from tests.test_job import CHEAP, facts
from videoflow import split
from videoflow.execute import JobSummary
from videoflow.recipe import Recipe
from workers.quality import Quality

TEST_PICTURE = "testsrc2=s=192x108:r=30:d=16,noise=alls=12:allf=t,format=yuv420p"
X264 = ["-c:v", "libx264", "-g", "40", "-bf", "3"]


def make(path: Path, *codec: str, source: str = TEST_PICTURE, out: tuple[str, ...] = ()) -> Path:
    path.parent.mkdir(exist_ok=True)
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", "-f", "lavfi", "-i", source, *codec, *out, str(path)]
    subprocess.run(command, check=True)
    return path


def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe = CHEAP) -> JobSummary:
    """The folder's videos unsplit and split: all that is stored must be equal. The split run's summary."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_job(recipe, [tmp_path / "in"], whole, workers=2)
    with monkeypatch.context() as m:
        m.setattr(split, "MIN_BYTES", 0)
        m.setattr(split, "MIN_PART_SECONDS", 2.0)
        summary = run_job(recipe, [tmp_path / "in"], cut, workers=6)
    assert facts(cut) == facts(whole)
    assert stored(cut) == stored(whole)
    assert not list((cut / "staging").rglob("*.json"))
    return summary


def stored(root: Path) -> dict[str, list[dict]]:
    """Every row of every artifact table, in order of its key and place; blobs by their bytes."""
    found = {}
    for table in ("videos", "frames", "shots", "quality", "clips"):
        (part,) = (root / table).glob("*/part-*.lance")
        dataset = lance.dataset(str(part))
        media = [f.name for f in dataset.schema if f.name == "data"]
        rows = dataset.to_table(columns=[f.name for f in dataset.schema if f.name not in media], with_row_id=True)
        listed = rows.to_pylist()
        for row in listed:
            row_id = row.pop("_rowid")
            for name in media:
                (blob,) = dataset.take_blobs(name, ids=[row_id])
                row[name] = blob.readall()
        found[table] = sorted(listed, key=lambda r: (r["item_key"], r.get("chunk", 0), r.get("t0_pts", 0)))
    return found


def parts(summary: JobSummary) -> int:
    return summary.stages.get("decode parts", {"items": 0})["items"]


def test_b_frames_with_closed_gops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in/a.mp4", *X264)
    summary = both(tmp_path, monkeypatch)
    assert parts(summary) >= 3
    assert summary.stages["join parts"]["items"] == 1
    assert "decode" not in summary.stages
    assert (summary.decoded_videos, summary.frames_decoded, summary.done) == (1, 480, 1)


def test_beside_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video that is too short, one with nothing to cut at, and one that is cut."""
    make(tmp_path / "in/a.mp4", *X264)
    make(tmp_path / "in/short.mp4", *X264, out=("-t", "2"))
    make(tmp_path / "in/one_gop.mp4", "-c:v", "libx264", "-g", "9999", "-sc_threshold", "0")
    summary = both(tmp_path, monkeypatch)
    assert parts(summary) >= 2
    assert summary.stages["decode"]["items"] == 2
    assert (summary.decoded_videos, summary.done) == (3, 3)


def test_other_clocks_and_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    make(folder / "late_start.mov", *X264, out=("-output_ts_offset", "7.3"))
    # every seventh frame is missing, and a second is shown for two
    uneven = TEST_PICTURE + ",select='mod(n,7)',setpts='PTS+if(gte(T,11),1/TB,0)'"
    make(folder / "uneven.mp4", *X264, source=uneven, out=("-fps_mode", "passthrough"))
    x265 = ["-c:v", "libx265", "-preset", "ultrafast", "-tag:v", "hvc1"]
    make(folder / "hevc.mp4", *x265, "-x265-params", "log-level=error:keyint=40:open-gop=0:radl=0")
    made = make(tmp_path / "out/made.mp4", *X264, source=TEST_PICTURE.replace("r=30", "r=30000/1001"))
    turn = ["-i", str(made), "-c", "copy", "-metadata:s:v:0", "rotate=90", str(folder / "2997_rotated.mp4")]
    subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *turn], check=True)
    summary = both(tmp_path, monkeypatch)
    assert summary.stages["join parts"]["items"] == 4
    assert parts(summary) >= 12
    assert "decode" not in summary.stages


def test_what_the_index_does_not_prove_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    make(folder / "open_gop.mp4", *X264, "-x264-params", "open-gop=1:keyint=40:scenecut=0:bframes=3")
    make(folder / "fragmented.mp4", *X264, out=("-movflags", "frag_keyframe+empty_moov"))
    make(folder / "vp9.mp4", "-c:v", "libvpx-vp9", "-g", "40", "-deadline", "realtime", "-cpu-used", "8")
    make(folder / "a.mkv", *X264)
    make(folder / "a.ts", *X264)
    summary = both(tmp_path, monkeypatch)
    assert parts(summary) == 0
    assert summary.stages["decode"]["items"] == 5


def test_damaged_videos_are_judged_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(tmp_path / "out/made.mp4", *X264, out=("-movflags", "faststart")).read_bytes()
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "cut_off.mp4").write_bytes(data[: int(0.7 * len(data))])
    at = int(0.6 * len(data))
    (folder / "hole.mp4").write_bytes(data[:at] + b"\xff" * 40_000 + data[at + 40_000 :])
    summary = both(tmp_path, monkeypatch)
    assert "join parts" not in summary.stages
    assert summary.stages["decode"]["items"] == 2
    assert all(row["damage"] for row in stored(tmp_path / "cut")["videos"])


def test_a_stage_that_must_see_all_of_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in/a.mp4", *X264, out=("-t", "12"))
    recipe = CHEAP.model_copy(update={"stages": {**CHEAP.stages, "mine": {"use": "tests.test_split:Last"}}})
    assert parts(both(tmp_path, monkeypatch, recipe)) == 0


def test_a_cut_video_is_reused_and_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a join committed is there for the next run; one more product decodes once more, in parts again."""
    make(tmp_path / "in/a.mp4", *X264)
    monkeypatch.setattr(split, "MIN_BYTES", 0)
    monkeypatch.setattr(split, "MIN_PART_SECONDS", 2.0)
    root = tmp_path / "cat"
    run_job(CHEAP, [tmp_path / "in"], root)
    assert run_job(CHEAP, [tmp_path / "in"], root).decoded_videos == 0
    shutil.rmtree(tmp_path / "plain", ignore_errors=True)
    smaller = CHEAP.with_settings(["frames.short_side=64"])
    summary = run_job(smaller, [tmp_path / "in"], root)
    assert (summary.decoded_videos, parts(summary) >= 3) == (1, True)


class Last(Quality):
    """A stage of somebody's that has no margin."""

    name, table = "last", "last"

    def margin(self) -> None:
        return None


def test_ray_cuts_with_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in/a.mp4", *X264)
    run_job(CHEAP, [tmp_path / "in"], tmp_path / "whole")
    monkeypatch.setattr(split, "MIN_BYTES", 0)
    monkeypatch.setattr(split, "MIN_PART_SECONDS", 2.0)
    summary = run_job(CHEAP, [tmp_path / "in"], tmp_path / "cut", engine="ray", workers=2)
    assert parts(summary) >= 3
    assert facts(tmp_path / "cut") == facts(tmp_path / "whole")
    assert stored(tmp_path / "cut") == stored(tmp_path / "whole")
