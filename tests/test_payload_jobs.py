"""Payload in a job: what is decoded again and how often, what is chosen, and stages that read the payload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lance
import pytest

import videoflow
from tests.jobs import run_job
from videoflow.errors import RecipeError
from videoflow.execute import JobSummary
from videoflow.forecast import forecast
from videoflow.identify import identify
from videoflow.keys import clip_order
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
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
    assert by_stage["barcodes"].to_compute == 0 and 1 <= by_stage["barcodes"].unknown <= 3
    run_job(wanted, [videos], root)
    by_stage = {f.stage: f for f in forecast(Plan(catalog.root, catalog.ledger, wanted, wanted.build(), found.videos))}
    assert [(f.cached, f.to_compute, f.unknown) for f in (by_stage["payload"], by_stage["barcodes"])] == [(4, 0, 0)] * 2
