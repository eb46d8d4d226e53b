"""Jobs: what is computed, reused and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lance
import numpy as np
import psutil
import pytest

import videoflow
from tests.jobs import Quiet, run_job
from videoflow.errors import SourceError, SystemFailure
from videoflow.recipe import Recipe
from videoflow.store.commit import Committer
from videoflow.testing import make_barcode_video

RECIPE = Recipe(
    stages={
        "frames": {},
        "shots": {"detector": "hsv"},
        "quality": {},
        "clips": {"by": "windows", "window_seconds": 1},
        "embed": {"dtype": "float32"},
    }
)
CHEAP = RECIPE.model_copy(update={"stages": {k: v for k, v in RECIPE.stages.items() if k != "embed"}})


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(6):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=60 + i, offset=100 * i)
    return folder


def facts(root: Path) -> dict[tuple, tuple]:
    """Everything the ledger says of results, without when and by whom."""
    rows = lance.dataset(str(root / "ledger.lance")).to_table().to_pylist()
    return {
        (r["stage"], r["fingerprint"], r["item_key"]): (r["state"], r["class"], r["rows"], r["output_digest"])
        for r in rows
    }


def item_rows(root: Path) -> dict[str, list[str]]:
    """Row keys of every artifact table, for counting doubles."""
    found = {}
    for table in ("videos", "frames", "shots", "quality", "clips", "embeddings"):
        for part in sorted((root / table).glob("*/part-*.lance")):
            d = lance.dataset(str(part))
            extra = [c for c in ("chunk", "clip_key") if c in d.schema.names]
            rows = d.to_table(columns=["item_key", *extra]).to_pylist()
            found[f"{table}/{part.parent.name}"] = sorted(str(list(r.values())) for r in rows)
    return found


def test_adding_files_decodes_only_those(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    first = run_job(CHEAP, [videos], root)
    assert (first.decoded_videos, first.version, first.clips) == (6, "x@1", 12 + 6 - 6 + _tail_clips())
    for i in range(3):
        make_barcode_video(videos / f"new{i}.mp4", num_frames=30, offset=1000 + 40 * i)
    second = run_job(CHEAP, [videos], root)
    assert (second.decoded_videos, second.videos, second.version) == (3, 9, "x@2")
    # The old version is as it was; the new one holds exactly this run's sources.
    assert len(videoflow.open(str(root)).version("x@1").clips()) == first.clips
    only = run_job(CHEAP, [videos / "new0.mp4"], root, name="y")
    assert (only.decoded_videos, only.videos, only.clips) == (0, 1, 1)


def _tail_clips() -> int:
    """Videos of 60…65 frames at 30/s: two whole windows each, and a rest shorter than half a second."""
    return 0


def test_two_names_of_the_same_bytes_are_one_video(videos: Path, tmp_path: Path) -> None:
    shutil.copy(videos / "v0.mp4", videos / "copy.mp4")
    summary = run_job(CHEAP, [videos], tmp_path / "cat")
    assert (summary.videos, summary.duplicates, summary.decoded_videos) == (6, 1, 6)


def test_changed_and_vanished_sources_are_named(videos: Path, tmp_path: Path) -> None:
    root, progress = tmp_path / "cat", Quiet()
    run_job(CHEAP, [videos], root)
    make_barcode_video(videos / "v0.mp4", num_frames=50, offset=7000)
    (videos / "v1.mp4").unlink()
    summary = run_job(CHEAP, [videos], root, progress=progress)
    assert summary.changed == (str(videos / "v0.mp4"),) and summary.vanished == (str(videos / "v1.mp4"),)
    assert any("v1.mp4" in n and "vanished" in n for n in progress.notes)
    assert summary.decoded_videos == 1


def test_downstream_changes_decode_nothing(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    run_job(CHEAP, [videos], root)
    for setting in ("clips.max_seconds=3", "clips.window_seconds=0.6", "clips.by=shots"):
        summary = run_job(CHEAP.with_settings([setting]), [videos], root)
        assert summary.decoded_videos == 0
    quality = run_job(CHEAP.with_settings(["quality.fps=4"]), [videos], root)
    assert quality.decoded_videos == 6
    assert quality.stages["decode"]["items"] == 6
    assert len(list((root / "frames").iterdir())) == 1  # the frame cache was not made again


def test_unreadable_and_missing_sources_are_accounted_for(videos: Path, tmp_path: Path) -> None:
    root, manifest = tmp_path / "cat", tmp_path / "m.csv"
    manifest.write_text(f"uri,who\n{videos}/v0.mp4,me\n{videos}/gone.mp4,me\n")
    summary = run_job(CHEAP, [manifest], root)
    assert (summary.videos, summary.done, summary.quarantined) == (2, 1, 1)
    (row,) = videoflow.open(str(root)).quarantine()
    assert row["uri"].endswith("gone.mp4") and (row["class"], row["stage"]) == ("io_error", "sources")
    assert set(videoflow.open(str(root)).version("x").clips()["who"].to_pylist()) == {"me"}
    before = facts(root)
    run_job(CHEAP, [manifest], root)
    assert facts(root) == before
    make_barcode_video(videos / "gone.mp4", num_frames=40, offset=5000)
    assert run_job(CHEAP, [manifest], root).done == 2
    assert videoflow.open(str(root)).quarantine() == []


@pytest.mark.timeout(600)
def test_ray_and_local_engines_write_the_same(videos: Path, corpus: Path, tmp_path: Path) -> None:
    for name in ("rotate_90.mov", "corrupt_midstream.mp4", "zero_byte.mp4", "cuts_bikes.mp4"):
        shutil.copy(corpus / name, videos / name)
    local, ray = tmp_path / "local", tmp_path / "ray"
    one = run_job(RECIPE, [videos], local)
    two = run_job(RECIPE, [videos], ray, engine="ray")
    assert facts(local) == facts(ray)
    assert item_rows(local) == item_rows(ray)
    assert (one.videos, one.done, one.clips) == (two.videos, two.done, two.clips)
    a, b = (videoflow.open(str(r)).version("x") for r in (local, ray))
    rows = [sorted(v.clips().to_pylist(), key=lambda r: r["position"]) for v in (a, b)]
    for left, right in zip(*rows, strict=True):
        for score in ("motion", "sharpness", "luma", "black"):
            assert left[score] == pytest.approx(right[score], rel=1e-5)
    vectors = [embeddings(r) for r in (local, ray)]
    assert vectors[0].keys() == vectors[1].keys() and len(vectors[0]) == one.clips
    for key, vector in vectors[0].items():
        assert float(vector @ vectors[1][key]) >= 0.9999


def embeddings(root: Path) -> dict[str, np.ndarray]:
    (part,) = (root / "embeddings").glob("*/part-00000.lance")
    table = lance.dataset(str(part)).to_table()
    return dict(zip(table["clip_key"].to_pylist(), np.array(table["vector"].to_pylist(), np.float64), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_job_resumes_to_the_same_result(videos: Path, tmp_path: Path, how: signal.Signals) -> None:
    undisturbed, root = tmp_path / "undisturbed", tmp_path / "cat"
    run_job(CHEAP, [videos], undisturbed)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(CHEAP.model_dump(mode="json")))
    command = [
        sys.executable,
        "-m",
        "videoflow.cli.main",
        "run",
        str(recipe),
        "--source",
        str(videos),
        "--root",
        str(root),
    ]
    command += ["--name", "x", "--engine", "local", "--workers", "1", "--json"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.poll() is None and not _committed(root):
        time.sleep(0.05)
    children = _children(job.pid)
    job.send_signal(how)
    job.communicate(timeout=60)
    if how == signal.SIGINT and job.returncode != 0:
        assert job.returncode == 130
    _assert_gone(children)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["videos"], result["done"], result["pending"]) == (6, 6, 0)
    assert facts(root) == facts(undisturbed)
    rows = item_rows(root)
    assert rows == item_rows(undisturbed)
    assert all(len(set(keys)) == len(keys) for keys in rows.values())


def _committed(root: Path) -> bool:
    return (
        any((root / "frames").glob("*/part-*.lance/_versions/*")) and len(facts(root)) > 0 if root.exists() else False
    )


def _children(pid: int) -> list[int]:
    try:
        return [p.pid for p in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _assert_gone(pids: list[int]) -> None:
    for _ in range(200):
        left = [
            p
            for p in pids
            if Path(f"/proc/{p}").exists() and "Z" not in Path(f"/proc/{p}/stat").read_text().rsplit(")", 1)[1][:3]
        ]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"processes {left} outlived the job")


def test_a_failing_store_stops_the_job_and_quarantines_nobody(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cat"
    real, calls = Committer.commit, []

    def full_disk(self: Committer, records: object) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise SystemFailure("cannot commit: the disk is full; make room and run the same command again")
        real(self, records)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "commit", full_disk)
    with pytest.raises(SystemFailure, match="full"):
        run_job(CHEAP, [videos], root)
    monkeypatch.undo()
    assert all(state != "quarantined" for state, *_ in facts(root).values())
    jobs = [json.loads(p.read_text()) for p in (root / "jobs").glob("*.json")]
    assert [j["state"] for j in jobs] == ["stopped"]
    summary = run_job(CHEAP, [videos], root)
    assert (summary.done, summary.pending) == (6, 0)
    assert summary.decoded_videos < 6 or os.environ.get("VIDEOFLOW_ONE_UNIT")


def test_manifest_intervals_become_clips(videos: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.csv"
    manifest.write_text(
        f"uri,start,end,caption\n{videos}/v0.mp4,0.5,1.5,one\n{videos}/v0.mp4,1.0,1.8,one\n{videos}/v0.mp4,90,91,one\n"
    )
    run_job(CHEAP, [manifest], tmp_path / "cat")
    clips = videoflow.open(str(tmp_path / "cat")).version("x").clips().to_pylist()
    assert [(c["t0_us"], c["t1_us"], c["first_frame"], c["last_frame"], c["segment"]) for c in clips] == [
        (500_000, 1_500_000, 15, 44, 0),
        (1_000_000, 1_800_000, 30, 53, 1),
    ]
    assert {c["caption"] for c in clips} == {"one"}


def captions_of(root: Path) -> dict[tuple[str, int], tuple[str, str | None]]:
    rows = videoflow.open(str(root)).version("x").clips().to_pylist()
    return {(Path(c["uri"]).name, c["t0_us"]): (c["caption"], c["lang"]) for c in rows}


def test_every_interval_has_the_metadata_of_its_own_row(videos: Path, tmp_path: Path) -> None:
    manifest, root = tmp_path / "m.csv", tmp_path / "cat"
    v0, v1 = videos / "v0.mp4", videos / "v1.mp4"

    def write(second: str) -> None:
        head = f"uri,start,end,caption,lang\n{v0},0.5,1.5,a cat,\n{v1},,,whole,de\n"
        manifest.write_text(f"{head}{v0},1.0,1.8,{second},fr\n{v0},,,,en\n")

    write("a dog")
    first = run_job(CHEAP, [manifest], root)
    said = captions_of(root)
    cat, dog = ("v0.mp4", 500_000), ("v0.mp4", 1_000_000)
    assert (said.pop(cat), said.pop(dog)) == (("a cat", "en"), ("a dog", "fr"))
    assert set(said.values()) == {("whole", "de")} and {name for name, _ in said} == {"v1.mp4"}
    again = run_job(CHEAP, [manifest], root)
    assert (again.decoded_videos, again.version, again.is_new_version) == (0, first.version, False)
    write("a bird")
    changed = run_job(CHEAP, [manifest], root)
    assert (changed.decoded_videos, changed.is_new_version) == (0, True)
    assert captions_of(root) == {**said, cat: ("a cat", "en"), dog: ("a bird", "fr")}


def test_copies_that_say_something_else_are_named(videos: Path, tmp_path: Path) -> None:
    manifest, a, b, c = tmp_path / "m.csv", *(videos / f"v{n}.mp4" for n in (0, 7, 8))
    shutil.copy(a, b)
    shutil.copy(a, c)
    rows = (f"{a},0.5,1.5,a cat", f"{b},0.5,1.5,a dog", f"{b},1.0,1.8,a bird", f"{c},1.0,1.8,a bird")
    manifest.write_text("\n".join(["uri,start,end,caption", *rows]))
    progress = Quiet()
    run_job(CHEAP, [manifest], tmp_path / "cat", progress=progress)
    rows = videoflow.open(str(tmp_path / "cat")).version("x").clips().to_pylist()
    assert [(r["t0_us"], r["caption"]) for r in rows] == [(500_000, "a cat"), (1_000_000, "a bird")]
    said = "1 sources hold the bytes of another one that says something else of them, which counts"
    assert [n for n in progress.notes if "another one" in n] == [f"{said}: {b}"]


def test_a_split_never_parts_the_intervals_of_a_video(videos: Path, tmp_path: Path) -> None:
    manifest, v0 = tmp_path / "m.csv", videos / "v0.mp4"
    manifest.write_text(f"uri,start,end,scene,take\n{v0},0.5,1.5,a,1\n{v0},1.0,1.8,b,1\n")
    with pytest.raises(SourceError, match=r"'scene' differs between the intervals of .*v0\.mp4 \('a' and 'b'\)"):
        run_job(CHEAP.model_copy(update={"split_by": "scene"}), [manifest], tmp_path / "cat")
    run_job(CHEAP.model_copy(update={"split_by": "take"}), [manifest], tmp_path / "cat")
    rows = videoflow.open(str(tmp_path / "cat")).version("x").clips().to_pylist()
    assert len(rows) == 2 and len({r["split"] for r in rows}) == 1


def test_intervals_of_older_catalogs_are_read(tmp_path: Path) -> None:
    """Their records have one word for the whole video, which counts for each interval."""
    from fractions import Fraction

    from videoflow.dataset.catalog import KnownSource
    from videoflow.identify import stored_intervals, stored_metadata

    told = '{"_intervals": [["1/2", "3/2"], ["1", "9/5"]], "caption": "a dog"}'
    newer = '{"_intervals": [["1/2", "3/2", {"caption": "a cat"}], ["2", "3"]]}'
    rows = [KnownSource(uri, 1, "", "k", text) for uri, text in (("/a", told), ("/b", newer))]
    half, one, two = (Fraction(1, 2), Fraction(3, 2)), (Fraction(1), Fraction(9, 5)), (Fraction(2), Fraction(3))
    assert stored_intervals(rows[:1]) == {half: {}, one: {}}
    assert stored_intervals(rows) == {half: {"caption": "a cat"}, one: {}, two: {}}
    assert stored_metadata(rows) == {"caption": "a dog"}


def test_splits_are_stable_and_follow_the_shares() -> None:
    from videoflow.dataset.publish import split_of
    from videoflow.keys import digest

    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    keys = [digest("k", i) for i in range(20_000)]
    splits = [split_of(k, shares) for k in keys]
    assert splits == [split_of(k, dict(shares)) for k in keys]
    for name, share in shares.items():
        assert splits.count(name) / len(keys) == pytest.approx(share, abs=0.01)


def test_a_lost_frame_cache_is_made_again_and_the_version_heals(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    first = run_job(CHEAP, [videos], root)
    shutil.rmtree(root / "frames")
    second = run_job(CHEAP, [videos], root)
    assert second.decoded_videos == 6
    version = videoflow.open(str(root)).version("x")
    assert version.num_clips == first.clips
    with version.loader(batch_size=4, frames=4, fps=8, size=64, epochs=1, tail="pad") as loader:
        assert sum(int(b["valid"].sum()) for b in loader) == first.clips


def test_a_source_that_changed_under_the_job_is_tried_by_the_next(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from videoflow.errors import MOVED_UNDER_THE_JOB, MediaError
    from workers import fetch

    root = tmp_path / "cat"

    def changed(item: object) -> None:
        raise MediaError("io_error", f"{MOVED_UNDER_THE_JOB}; run again")

    with monkeypatch.context() as m:
        m.setattr(fetch, "_check_stamp", changed)
        assert run_job(CHEAP, [videos], root).quarantined == 6
    summary = run_job(CHEAP, [videos], root)
    assert (summary.done, summary.quarantined, summary.decoded_videos) == (6, 0, 6)


def test_a_frame_that_is_shown_for_hours_is_looked_at_once(tmp_path: Path) -> None:
    source = "testsrc=s=64x48:r=1/7200:d=21600"
    command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, "-pix_fmt", "yuv420p", str(tmp_path / "slow.mp4")]
    subprocess.run(command, check=True)
    summary = run_job(RECIPE.with_settings(["clips.by=shots"]), [tmp_path / "slow.mp4"], tmp_path / "cat")
    assert (summary.done, summary.quarantined) == (1, 0)
    (part,) = (tmp_path / "cat" / "embeddings").glob("*/part-*.lance")
    assert set(lance.dataset(str(part)).to_table()["num_frames"].to_pylist()) == {1}
