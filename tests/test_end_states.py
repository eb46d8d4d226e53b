"""All hard files in one run: every file ends as INDEX.tsv asks, and a second run does nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import lance
import pytest

import videoflow
from tests.conftest import read_tsv
from tests.jobs import run_job
from videoflow import recipe as recipes
from videoflow.dataset.catalog import Catalog
from videoflow.testing import read_barcode

INDEX = read_tsv("INDEX.tsv")
CLASSES = {
    "audio_only.mp4": "no_video_stream",
    "corrupt_header_no_moov.mp4": "header_damaged",
    "text_named_mp4.mp4": "not_video",
    "truncated_moov_lost.mp4": "header_damaged",
    "zero_byte.mp4": "empty",
}


def by_file(catalog: Catalog, corpus: Path) -> dict[str, dict]:
    """The videos row of every source that has one, by name below the corpus."""
    (fingerprint,) = catalog.root.list_dirs("videos")
    rows = lance.dataset(catalog.root.uri(f"videos/{fingerprint}/part-00000.lance")).to_table().to_pylist()
    keyed = {r["video_key"]: r for r in rows}
    assert len(keyed) == len(rows)  # nothing doubled
    sources = catalog.known_sources()
    return {
        str(Path(u).relative_to(corpus.absolute())): keyed[s.video_key]
        for u, s in sources.items()
        if s.video_key in keyed
    }


@pytest.mark.parametrize("row", INDEX, ids=lambda r: r["file"])
def test_every_file_ends_as_expected(corpus: Path, catalog_of_hard_files: Catalog, row: dict[str, str]) -> None:
    name, expected = row["file"], row["expected"]
    videos = by_file(catalog_of_hard_files, corpus)
    quarantined = {str(Path(r["uri"]).relative_to(corpus.absolute())): r for r in catalog_of_hard_files.quarantine()}
    if name in CLASSES:
        assert quarantined[name]["class"] == CLASSES[name]
        assert quarantined[name]["message"]
        return
    assert name not in quarantined
    if name == "codec_without_decoder_vvc.mp4":
        assert videos[name]["num_frames"] == 120  # PyAV's FFmpeg has the decoder
        return
    count = int(re.search(r"(\d+)(?: shown)? frames", expected)[1])  # type: ignore[index]
    assert videos[name]["num_frames"] == count
    assert bool(videos[name]["damage"]) == ("partly" in expected)
    if "two sizes" in expected:
        assert videos[name]["size_changes"] == 1


def test_the_count_adds_up(catalog_of_hard_files: Catalog) -> None:
    summary = json.loads((Path(catalog_of_hard_files.root.url) / "summary.json").read_text())
    assert (summary["videos"], summary["done"], summary["quarantined"], summary["pending"]) == (46, 41, 5, 0)
    assert summary["ignored"] == 3 and summary["decoded_videos"] == 46


def test_a_second_run_decodes_nothing_writes_nothing_and_answers_with_the_version(
    corpus: Path, catalog_of_hard_files: Catalog
) -> None:
    root = Path(catalog_of_hard_files.root.url)

    def tables() -> dict[str, int]:
        found = {str(p.relative_to(root)): lance.dataset(str(p)).version for p in root.rglob("*.lance") if p.is_dir()}
        assert len(found) >= 8
        return found

    before, old = tables(), catalog_of_hard_files.version("hard")
    summary = run_job(recipes.load("clips"), [corpus], root, name="hard")
    assert summary.decoded_videos == 0 and summary.version == old.id
    assert (summary.videos, summary.done, summary.quarantined) == (46, 41, 5)
    assert tables() == before


def test_no_clip_holds_a_damaged_frame(corpus: Path, catalog_of_hard_files: Catalog) -> None:
    videos = by_file(catalog_of_hard_files, corpus)
    damaged = {v["video_key"]: v["damage"] for v in videos.values() if v["damage"]}
    assert len(damaged) == 3
    for clip in catalog_of_hard_files.version("hard").clips().to_pylist():
        for d in damaged.get(clip["video_key"], []):
            assert clip["t1_pts"] <= d["t0_pts"] or clip["t0_pts"] >= d["t1_pts"]


@pytest.mark.parametrize("name", ["hole_in_gop_4_of_10.mp4", "keyframe_every_50.mp4", "episodes_40x37_at_2997.mp4"])
def test_barcodes_through_the_loader(catalog_of_hard_files: Catalog, name: str) -> None:
    version = videoflow.open(catalog_of_hard_files.root.url).version("hard")
    where = f"uri LIKE '%{name}'"
    seen = 0
    with version.loader(batch_size=1, frames="1+1k", fps=8, filter=where, shuffle=False, epochs=1) as loader:
        for batch in loader:
            (clip,) = version.clips(filter=f"clip_key = '{batch['clip_key'][0]}'").to_pylist()
            pictures = batch["video"][0].permute(0, 2, 3, 1).numpy()
            for picture, seconds, valid in zip(
                pictures, batch["pts_seconds"][0].tolist(), batch["frame_valid"][0], strict=True
            ):
                rate = 25 if "keyframe" in name else 30 if "hole" in name else 30000 / 1001
                if valid:
                    assert read_barcode(picture) == round(seconds * rate)
                    seen += 1
            assert clip["t0_us"] <= round(batch["pts_seconds"][0, 0].item() * 1e6) < clip["t1_us"]
    assert seen > 20
