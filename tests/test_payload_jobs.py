"""Payload in a job: what is decoded again and how often, what is chosen, and stages that read the payload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lance
import pytest

import videoflow
from tests.jobs import run_job
from videoflow.chosen import source_units
from videoflow.errors import MOVED_UNDER_THE_JOB, MediaError, RecipeError, SystemFailure
from videoflow.execute import JobSummary
from videoflow.forecast import forecast
from videoflow.identify import identify
from videoflow.keys import clip_order
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.store.commit import Committer
from videoflow.testing import make_barcode_video

BARCODES, FIRST = {"use": "tests.payload_stages:Barcodes"}, {"use": "tests.payload_stages:FirstNumber"}


def recipe(payload: dict[str, Any] | None = None, **stages: dict[str, Any]) -> Recipe:
    made = {"frames": {}, "clips": {"by": "windows", "window_seconds": 1}, "payload": payload or {}}
    return Recipe(stages={**made, **stages})


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(3):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=90, offset=100 * i)
    return folder


def rows(root: Path, table: str) -> list[dict[str, Any]]:
    """Rows of an artifact table in the order they lie in, blobs left out."""
    found = []
    for part in sorted((root / table).glob("*/part-*.lance")):
        dataset = lance.dataset(str(part))
        light = [n for n in dataset.schema.names if n != "data"]
        found += dataset.to_table(columns=light).to_pylist()
    return found


def spoil(videos: Path) -> None:
    """Overwrite the files so that nobody can decode them, with size and time as they were."""
    for path in videos.iterdir():
        before = path.stat()
        path.write_bytes(bytes(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_intervals_are_decoded_once_and_stages_on_the_payload_open_no_source(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    first = run_job(recipe(barcodes=BARCODES), [videos], root)
    # Nine clips of a second, side by side: three stretches, one a video.
    assert (first.decoded_videos, first.decoded_intervals, first.intervals_from_start) == (3, 3, 0)
    assert (first.clips, first.done, first.quarantined, first.pending) == (9, 3, 0, 0)
    clips = {r["clip_key"]: r for r in videoflow.open(root).version("x").clips().to_pylist()}
    offsets = {r["video_key"]: 100 * int(Path(r["uri"]).stem[1:]) for r in clips.values()}
    read = rows(root, "barcodes")
    assert len(read) == 9
    for row in read:
        clip = clips[row["clip_key"]]
        own = range(clip["first_frame"], clip["last_frame"] + 1)
        assert row["numbers"] == [offsets[row["video_key"]] + i for i in own]
        assert row["seconds"] == pytest.approx([i / 30 for i in own], abs=1e-9)
    spoil(videos)
    second = run_job(recipe(barcodes={**BARCODES, "tag": "other", "fps": "15"}), [videos], root)
    assert (second.decoded_videos, second.decoded_intervals, second.quarantined) == (0, 0, 0)
    again = [r for r in rows(root, "barcodes") if len(r["numbers"]) == 15]
    assert {r["clip_key"]: r["numbers"] for r in again} == {
        r["clip_key"]: r["numbers"][::2] for r in read if len(r["numbers"]) == 30
    }


def test_another_rate_of_the_payload_decodes_intervals_again_and_nothing_else(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    run_job(recipe(barcodes=BARCODES), [videos], root)
    other = run_job(recipe({"fps": 24}, barcodes=BARCODES), [videos], root)
    assert (other.decoded_videos, other.decoded_intervals) == (0, 3)
    by_fps = {(r["fps_num"], len(r["pts"])) for r in rows(root, "payload")}
    assert by_fps == {(0, 30), (24, 24)}
    assert {len(r["numbers"]) for r in rows(root, "barcodes")} == {30, 24}


def test_rows_lie_in_the_order_of_a_hash(videos: Path, tmp_path: Path) -> None:
    run_job(recipe(), [videos], tmp_path / "cat", workers=1)
    fragments = lance.dataset(str(next((tmp_path / "cat" / "payload").glob("*/part-*.lance")))).get_fragments()
    for fragment in fragments:
        keys = fragment.to_table(columns=["clip_key"])["clip_key"].to_pylist()
        assert keys == sorted(keys, key=clip_order)


def chosen(summary: JobSummary, root: Path) -> set[str]:
    table = videoflow.open(root).version(summary.version or "x").clips(columns=["clip_key", "payload"])
    return {r["clip_key"] for r in table.to_pylist() if r["payload"]}


def test_clips_are_chosen_by_condition_and_count(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    some = run_job(recipe({"count": 2}), [videos], root)
    keys = [r["clip_key"] for r in videoflow.open(root).version("x").clips().to_pylist()]
    assert chosen(some, root) == set(sorted(keys, key=clip_order)[:2])
    more = run_job(recipe({"count": 5}), [videos], root)
    assert chosen(some, root) < chosen(more, root) and len(chosen(more, root)) == 5
    assert len(rows(root, "payload")) == 5  # those of the smaller count were not made again
    assert (more.is_new_version, more.decoded_videos) == (True, 0)
    scored = run_job(recipe({"where": "first_number >= 200 AND t0_us > 500000"}, first=FIRST), [videos], root)
    picked = [r for r in videoflow.open(root).version(scored.version or "").clips().to_pylist() if r["payload"]]
    assert sorted(r["t0_us"] for r in picked) == [1_000_000, 2_000_000]
    assert {r["first_number"] // 100 for r in picked} == {2}
    with pytest.raises(RecipeError, match=r"stages.payload.where.*nothing.*t0_us"):
        run_job(recipe({"where": "nothing > 1"}), [videos], root)
    named = run_job(recipe({"where": "uri LIKE '%.mp4'"}), [videos], root)
    assert named.version


@pytest.mark.parametrize("where", ["drop table clips", "nothing > 1", "first_number > 'x y'::DATE"])
def test_a_condition_that_is_none_is_told_before_anything_is_decoded(videos: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(RecipeError, match=r"stages.payload.where: .*columns: .*uri, first_number"):
        run_job(recipe({"where": where}, first=FIRST), [videos], tmp_path / "cat")
    assert not (tmp_path / "cat").exists()


def test_overlapping_clips_share_their_decoding(videos: Path, tmp_path: Path) -> None:
    sliding = {"by": "sliding", "window_seconds": 1, "stride_seconds": 0.5}
    summary = run_job(recipe(clips=sliding, barcodes=BARCODES), [videos], tmp_path / "cat")
    assert summary.decoded_intervals == 3
    read = rows(tmp_path / "cat", "barcodes")
    assert len(read) == 3 * 5 and all(r["numbers"] == list(range(r["numbers"][0], r["numbers"][0] + 30)) for r in read)


def test_plan_counts_chosen_clips_and_their_seconds(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    without = recipe().model_copy(update={"stages": {k: v for k, v in recipe().stages.items() if k != "payload"}})
    run_job(without, [videos], root)
    catalog, wanted = videoflow.open(root), recipe({"count": 4}, barcodes=BARCODES)
    found = identify(catalog, scan([str(videos)]), job="j")
    by_stage = {f.stage: f for f in forecast(Plan(catalog.root, catalog.ledger, wanted, wanted.build(), found.videos))}
    assert (by_stage["payload"].to_compute, by_stage["payload"].seconds) == (4, 4.0)
    assert by_stage["payload"].num_bytes == int(4 * 128 * 64 * 30 * 0.16 / 8)
    assert by_stage["barcodes"].to_compute == 0 and 1 <= by_stage["barcodes"].unknown <= 3
    run_job(wanted, [videos], root)
    by_stage = {f.stage: f for f in forecast(Plan(catalog.root, catalog.ledger, wanted, wanted.build(), found.videos))}
    assert [(f.cached, f.to_compute, f.unknown) for f in (by_stage["payload"], by_stage["barcodes"])] == [(4, 0, 0)] * 2


def test_rows_do_not_depend_on_how_work_was_cut(videos: Path, tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        root = tmp_path / f"by{workers}"
        run_job(recipe(), [videos], root, workers=workers)
        found.append({r["clip_key"]: (r["item_key"], r["digest"], r["pts"]) for r in rows(root, "payload")})
    assert found[0] == found[1] and len(found[0]) == 9


def test_what_was_killed_is_made_again_and_nothing_else(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, undisturbed = tmp_path / "cat", tmp_path / "whole"
    run_job(recipe(), [videos], undisturbed)
    commit, calls = Committer.commit, list[int]()

    def dies(self: Committer, records: Any) -> Any:
        if any(r.target.stage == "payload" for r in records):
            calls.append(1)
            if len(calls) == 2:  # one unit is committed, the second is staged
                raise SystemFailure("the power went out")
        return commit(self, records)

    monkeypatch.setattr(Committer, "commit", dies)
    with pytest.raises(SystemFailure, match="power"):
        run_job(recipe(), [videos], root, workers=1)
    monkeypatch.setattr(Committer, "commit", commit)
    again = run_job(recipe(), [videos], root, workers=1)
    assert (again.decoded_videos, again.done) == (0, 3) and again.decoded_intervals <= 2
    made = [[(r["item_key"], r["digest"]) for r in rows(r, "payload")] for r in (root, undisturbed)]
    assert sorted(made[0]) == sorted(made[1])


def test_units_hold_whole_videos_up_to_a_block(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cat"
    run_job(recipe(), [videos], root)
    catalog, wanted = videoflow.open(root), recipe({"crf": 24})
    plan = Plan(
        catalog.root, catalog.ledger, wanted, wanted.build(), identify(catalog, scan([str(videos)]), job="j").videos
    )
    built, clips = plan.named("payload"), plan.clips()
    assert built is not None
    one = 3 * 128 * 64 * 30 * 0.16 / 8 / 2  # three seconds at half the bits
    for block, sizes in ((one * 1.5, [2, 1]), (one * 0.5, [1, 1, 1]), (one * 100, [3])):
        monkeypatch.setattr("videoflow.chosen.BLOCK_BYTES", block)
        monkeypatch.setattr("videoflow.chosen.UNITS_PER_WORKER", 1)
        units = source_units(plan, built, clips, plan.clip_items(built, clips), workers=1)
        held = [[i.video.video_key for i in items] for items in units]
        assert [len(v) for v in held] == sizes and units.num_clips == 9
        assert sorted(k for unit in held for k in unit) == sorted(plan.keys)


@pytest.mark.timeout(600)
def test_ray_makes_the_same_payload(videos: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = []
    for engine in ("local", "ray"):
        root = tmp_path / engine
        summary = run_job(recipe({"fps": 24}, barcodes=BARCODES), [videos], root, engine=engine)
        assert (summary.decoded_intervals, summary.quarantined) == (3, 0)
        tables = [
            sorted((r["item_key"], str(r.get("digest", r.get("numbers")))) for r in rows(root, t))
            for t in ("payload", "barcodes")
        ]
        found.append(tables)
    assert found[0] == found[1]


def test_a_source_that_was_moved_under_a_job_is_tried_again(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers import fetch

    root, real = tmp_path / "cat", fetch._check_stamp
    run_job(Recipe(stages={k: v for k, v in recipe().stages.items() if k != "payload"}), [videos], root)

    def moved(item: Any) -> None:
        if item.path.endswith("v1.mp4"):
            raise MediaError("io_error", f"{MOVED_UNDER_THE_JOB}; run again")
        real(item)

    monkeypatch.setattr(fetch, "_check_stamp", moved)
    first = run_job(recipe(), [videos], root)
    assert (first.done, first.quarantined) == (2, 1)
    monkeypatch.setattr(fetch, "_check_stamp", real)
    again = run_job(recipe(), [videos], root)
    assert (again.done, again.quarantined, again.decoded_intervals) == (3, 0, 1)


def test_what_a_recipe_with_a_payload_must_have() -> None:
    with pytest.raises(RecipeError, match="'payload' reads frames, which the recipe does not have"):
        Recipe(stages={"clips": {"by": "windows"}, "payload": {}}).build()
    with pytest.raises(RecipeError, match="'barcodes' reads payload, which the recipe does not have"):
        Recipe(stages={"frames": {}, "clips": {"by": "windows"}, "barcodes": BARCODES}).build()
    order = [b.key for b in recipe(barcodes=BARCODES, first=FIRST).build()]
    assert order.index("first") < order.index("payload") < order.index("barcodes")
