"""Tokens through whole jobs: a codebook that is learned once, the same on both engines, resumed, and seen in a version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lance
import pytest

import videoflow
from tests.jobs import Quiet, run_job
from tests.test_job import facts
from tests.test_payload_jobs import spoil
from videoflow import fitting
from videoflow import recipe as recipes
from videoflow.dataset.catalog import Catalog
from videoflow.errors import DamagedCatalog, SourceError, SystemFailure
from videoflow.explain import find_subject, verdicts
from videoflow.forecast import forecast
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.store.layout import Root
from videoflow.store.usage import usage
from videoflow.testing import make_barcode_video
from workers.tokenize import Tokenize

pytest.importorskip("sklearn", reason="needs videoflow[patch-vq]")

RECIPE = Recipe(
    stages={
        "frames": {"short_side": 64},
        "clips": {"by": "windows", "window_seconds": 1},
        "tokenize": {"codes": 32, "levels": 2},
    }
)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(3):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=90, offset=100 * i)
    return folder


def tokens(root: Path) -> dict[str, tuple[Any, ...]]:
    """By clip key: what is stored, bytes included."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in sorted((root / "tokens").glob("*/part-*.lance")):
        for row in lance.dataset(str(part)).to_table().to_pylist():
            assert row["clip_key"] not in found
            found[row["clip_key"]] = (row["item_key"], tuple(row["shape"]), row["data"], row["psnr"], row["num_frames"])
    return found


def learned(root: Path) -> list[bytes]:
    return [p.read_bytes() for p in sorted((root / "fits").rglob("*")) if p.is_file()]


def test_a_second_run_learns_nothing_and_computes_nothing(videos: Path, tmp_path: Path) -> None:
    root, progress = tmp_path / "cat", Quiet()
    first = run_job(RECIPE, [videos], root, progress=progress)
    assert (first.done, first.clips, len(learned(root))) == (3, 9, 1)
    assert sum("learns from 9 of 9 clips" in n for n in progress.notes) == 1
    before, stored = facts(root), tokens(root)
    assert len(stored) == 9
    again = Quiet()
    second = run_job(RECIPE, [videos], root, progress=again)
    assert (second.version, second.is_new_version, again.begun[1:]) == (first.version, False, [])
    assert not any("learns" in n for n in again.notes)
    assert (facts(root), tokens(root)) == (before, stored)


def test_new_videos_do_not_change_the_codebook(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    run_job(RECIPE, [videos], root)
    before, book = tokens(root), learned(root)
    make_barcode_video(videos / "new.mp4", num_frames=90, offset=900)
    summary = run_job(RECIPE, [videos], root)
    after = tokens(root)
    assert (summary.clips, learned(root)) == (12, book)
    assert len(after) == 12 and before.items() <= after.items()
    assert summary.stages["tokenize"]["items"] == 3


def test_the_plan_knows_what_was_learned(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    catalog = Catalog.open(root, create=True)
    unfitted = Plan(catalog.root, catalog.ledger, RECIPE, RECIPE.build(), []).named("tokenize")
    run_job(RECIPE, [videos], root)
    sources = catalog.known_sources()
    from videoflow.plan import VideoSource

    found = [VideoSource(r.video_key, u, u, r.size or 0, r.stamp or "") for u, r in sources.items()]
    plan = Plan(catalog.root, catalog.ledger, RECIPE, RECIPE.build(), found)
    (told,) = [f for f in forecast(plan) if f.stage == "tokenize"]
    assert (told.cached, told.to_compute, told.grain) == (9, 0, "clip")
    assert unfitted is not None and told.fingerprint != unfitted.fingerprint
    other = RECIPE.with_settings(["tokenize.codes=16"])
    (told,) = [
        f for f in forecast(Plan(catalog.root, catalog.ledger, other, other.build(), found)) if f.stage == "tokenize"
    ]
    assert (told.cached, told.to_compute) == (0, 9)


class Killed(Exception):
    """The process is gone."""


@pytest.mark.parametrize("when", ["before it is learned", "before it is kept", "after it is kept", "in the middle"])
def test_a_job_that_ends_anywhere_resumes_to_the_same(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    undisturbed, root = tmp_path / "undisturbed", tmp_path / "cat"
    run_job(RECIPE, [videos], undisturbed)
    calls = 0

    def dies(self: Any, *args: Any, **options: Any) -> Any:
        raise Killed

    def dies_at_the_third(self: Tokenize, clips: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise SystemFailure("the disk is gone")
        return process(self, clips)

    process, put_new = Tokenize.process, Root.put_new

    def dies_at_the_put(self: Root, path: str, data: bytes) -> bool:
        if path.startswith("fits/"):
            raise Killed
        return put_new(self, path, data)

    with monkeypatch.context() as patch:
        if when == "before it is learned":
            patch.setattr(Tokenize, "fit", dies)
        elif when == "before it is kept":
            patch.setattr(Root, "put_new", dies_at_the_put)
        elif when == "after it is kept":
            patch.setattr(Plan, "replace", dies)
        else:
            patch.setattr(Tokenize, "process", dies_at_the_third)
        with pytest.raises((Killed, SystemFailure)):
            run_job(RECIPE, [videos], root, workers=1)
    summary = run_job(RECIPE, [videos], root, workers=1)
    assert (summary.pending, summary.quarantined) == (0, 0)
    assert learned(root) == learned(undisturbed)
    assert (facts(root), tokens(root)) == (facts(undisturbed), tokens(undisturbed))


def test_of_two_jobs_the_first_ones_codebook_counts(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job learns from other clips and keeps its codebook while this one still learns."""
    root, other = tmp_path / "cat", tmp_path / "other"
    run_job(RECIPE, [videos / "v0.mp4"], other)
    fit = Tokenize.fit

    def slowly(self: Tokenize, clips: Iterator[Any]) -> bytes:
        made = fit(self, clips)
        shutil.copytree(other / "fits", root / "fits")
        return made

    monkeypatch.setattr(Tokenize, "fit", slowly)
    run_job(RECIPE, [videos], root)
    assert learned(root) == learned(other)
    mine, theirs = tokens(root), tokens(other)
    assert len(theirs) == 3 and theirs.items() <= mine.items()


@pytest.mark.timeout(600)
def test_ray_and_local_engines_make_the_same_ids(videos: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copy(corpus / "rotate_90.mov", videos / "rotate_90.mov")
    local, ray, small = tmp_path / "local", tmp_path / "ray", tmp_path / "small"
    run_job(RECIPE, [videos], local)
    run_job(RECIPE, [videos], ray, engine="ray")
    assert learned(local) == learned(ray)
    assert tokens(local) == tokens(ray)
    assert facts(local) == facts(ray)
    with pytest.MonkeyPatch.context() as patch:  # units of one clip instead of several
        patch.setattr("videoflow.execute.MAX_CLIPS_PER_UNIT", 1)
        run_job(RECIPE, [videos], small, workers=1)
    assert tokens(local) == tokens(small)


def test_a_version_leads_to_the_tokens_and_has_the_scores(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    run_job(RECIPE, [videos], root)
    version = videoflow.open(root).version("x")
    clips = version.clips()
    assert clips.schema.field("tokens").type.names == ["part", "row_id", "shape"]
    stored = tokens(root)
    for row in clips.to_pylist():
        assert tuple(row["tokens"]["shape"]) == stored[row["clip_key"]][1]
        assert row["tokenize_psnr"] == stored[row["clip_key"]][3] > 20
        assert 0 < row["tokenize_ssim"] <= 1
    assert "tokenize_data" not in clips.column_names
    best = version.sql("SELECT max(tokenize_psnr) AS best FROM clips")["best"][0].as_py()
    assert best == max(r[3] for r in stored.values())
    assert version.manifest["tables"]["tokens"][0].startswith("tokens/")


def test_a_second_tokenizer_has_a_column_of_its_own(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    stages = {**RECIPE.stages, "coarse": {"use": "tokenize", "codes": 8, "levels": 1, "max_frames": 4}}
    both = RECIPE.model_copy(update={"stages": stages})
    run_job(RECIPE, [videos], root)
    summary = run_job(both, [videos], root)
    assert (summary.decoded_videos, summary.stages.keys()) == (0, {"coarse"})
    version = videoflow.open(root).version("x")
    with version.loader(batch_size=3, video=False, columns=["tokens", "coarse"], epochs=1) as loader:
        batch = next(loader)
    assert batch["tokens"].shape[:3] == (3, 2, 8)
    assert batch["coarse"].shape[:2] == (3, 4) and int(batch["coarse"].max()) < 8
    assert len(learned(root)) == 2


def test_damaged_cached_frames_are_not_learned_from(videos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from videoflow.errors import BadSample
    from videoflow.loader.reader import ClipReader

    read, seen = ClipReader.read, []

    def damaged(self: ClipReader, clips: Any, wanted: Any, **options: Any) -> Any:
        seen.append(clips[0].clip_key)
        if len(seen) == 1:
            raise BadSample("its CRC is wrong")
        return read(self, clips, wanted, **options)

    monkeypatch.setattr(fitting.ClipReader, "read", damaged)
    summary = run_job(RECIPE, [videos], tmp_path / "cat")
    assert summary.quarantined == 0 and len(tokens(tmp_path / "cat")) == 9


# ── captions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def caption_recipe(tmp_path: Path) -> Recipe:
    tokenizers = pytest.importorskip("tokenizers", reason="needs videoflow[transformers]")
    words = {"[UNK]": 0, "two": 1, "ducks": 2, "swim": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    text = {"encoder": "tokenizers", "weights": str(tmp_path / "tokenizer.json")}
    stages = {k: v for k, v in RECIPE.stages.items() if k != "tokenize"}
    return RECIPE.model_copy(update={"stages": {**stages, "text": text}})


def write_manifest(path: Path, videos: Path, captions: dict[str, str]) -> Path:
    lines = [json.dumps({"uri": str(videos / name), "caption": text}) for name, text in captions.items()]
    path.write_text("\n".join(lines))
    return path


def test_captions_are_encoded_once_and_again_when_they_change(videos: Path, tmp_path: Path) -> None:
    recipe, root = caption_recipe(tmp_path), tmp_path / "cat"
    manifest = tmp_path / "m.jsonl"
    write_manifest(manifest, videos, {"v0.mp4": "two ducks", "v1.mp4": "ducks swim swim", "v2.mp4": ""})
    first = run_job(recipe, [manifest], root)
    assert (first.done, first.filtered, first.stages["text"]["items"]) == (3, 0, 3)
    version = videoflow.open(root).version("x")
    wanted = {"v0.mp4": [2], "v1.mp4": [3], "v2.mp4": None}
    for row in version.clips().to_pylist():
        ref = row["text_ids"]
        assert (ref and ref["shape"]) == wanted[Path(row["uri"]).name]
    options = {"batch_size": 6, "video": False, "columns": ["text_ids", "caption"], "shuffle": False, "epochs": 1}
    with version.loader(filter="text_ids IS NOT NULL", **options) as loader:
        batch = next(loader)
    ids = {"two ducks": [1, 2, 0], "ducks swim swim": [2, 3, 3]}
    assert batch["text_ids"].tolist() == [ids[c] for c in batch["caption"]]
    assert batch["text_mask"].sum(1).tolist() == [len(c.split()) for c in batch["caption"]]
    write_manifest(manifest, videos, {"v0.mp4": "two ducks", "v1.mp4": "swim", "v2.mp4": ""})
    second = run_job(recipe, [manifest], root)
    assert (second.version, second.decoded_videos, second.stages["text"]["items"]) == ("x@2", 0, 1)
    refs = {
        (Path(r["uri"]).name, *(r["text_ids"] or {}).get("shape", []))
        for r in videoflow.open(root).version("x").clips().to_pylist()
    }
    assert refs == {("v0.mp4", 2), ("v1.mp4", 1), ("v2.mp4",)}
    assert run_job(recipe, [manifest], root).is_new_version is False
    catalog = Catalog.open(root)
    subject = find_subject(catalog, str(videos / "v1.mp4"))
    (told,) = [v for v in verdicts(catalog, subject, recipe) if v.stage == "text"]
    assert (told.cached, told.to_compute) == (1, 0)


def test_overlapping_intervals_have_the_ids_of_their_own_captions(videos: Path, tmp_path: Path) -> None:
    recipe, root, manifest = caption_recipe(tmp_path), tmp_path / "cat", tmp_path / "m.csv"
    ids = {"two ducks": [1, 2], "swim": [3], "ducks swim two": [2, 3, 1]}

    def write(second: str) -> None:
        rows = [(0.1, 0.9, "two ducks"), (0.4, 1.2, second), (0.3, 0.8, ""), (0.2, 0.7, "two ducks")]
        lines = [f"{videos}/v0.mp4,{a},{b},{caption}" for a, b, caption in rows]
        manifest.write_text("\n".join(["uri,start,end,caption", *lines, f"{videos}/v1.mp4,,,swim"]))

    def pairs() -> list[tuple[str, int, str | None, list[int] | None]]:
        """What a trainer is given: of every clip its caption and its ids."""
        version = videoflow.open(root).version("x")
        rows = version.clips().to_pylist()
        options = {"batch_size": 1, "video": False, "columns": ["text_ids", "caption"], "shuffle": False, "epochs": 1}
        found = []
        for row in rows:
            given = None
            if row["text_ids"]:
                with version.loader(filter=f"clip_key = '{row['clip_key']}'", **options) as loader:
                    batch = next(loader)
                assert batch["caption"] == [row["caption"]]
                given = batch["text_ids"][0].tolist()
            found.append((Path(row["uri"]).name, row["segment"], row["caption"], given))
        return sorted(found)

    for second in ("swim", "ducks swim two"):
        write(second)
        summary = run_job(recipe, [manifest], root)
        assert (summary.is_new_version, summary.quarantined) == (True, 0)
        found = pairs()
        assert [p for p in found if p[0] == "v0.mp4"] == [
            ("v0.mp4", 0, "two ducks", ids["two ducks"]),
            ("v0.mp4", 1, second, ids[second]),
            ("v0.mp4", 2, None, None),
            ("v0.mp4", 3, "two ducks", ids["two ducks"]),
        ]
        whole = [p[1:] for p in found if p[0] == "v1.mp4"]
        assert whole and set(map(str, whole)) == {str((-1, "swim", ids["swim"]))}
        again = run_job(recipe, [manifest], root)
        assert (again.is_new_version, again.decoded_videos, "text" in again.stages) == (False, 0, False)
    assert (summary.decoded_videos, summary.stages["text"]["items"]) == (0, 1)
    catalog = Catalog.open(root)
    subject = find_subject(catalog, str(videos / "v0.mp4"))
    (told,) = [v for v in verdicts(catalog, subject, recipe) if v.stage == "text"]
    assert (told.cached, told.to_compute) == (1, 0)


def test_a_quarantined_video_has_no_text_item(videos: Path, tmp_path: Path) -> None:
    recipe = caption_recipe(tmp_path)
    (videos / "broken.mp4").write_bytes(b"")
    captions = {"v0.mp4": "two ducks", "broken.mp4": "swim"}
    summary = run_job(recipe, [write_manifest(tmp_path / "m.jsonl", videos, captions)], tmp_path / "cat")
    assert (summary.done, summary.quarantined, summary.pending) == (1, 1, 0)
    assert summary.stages["text"]["items"] == 1


# ── on the payload, and the recipe as it ships ───────────────────────────────────────────────────────────────────────


def test_tokenizers_of_the_payload_open_no_source(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    tokenize = {**RECIPE.stages["tokenize"], "source": "payload", "max_frames": 9}
    stages = {**RECIPE.stages, "tokenize": tokenize, "payload": {"fps": "native", "short_side": 48, "count": 5}}
    first = run_job(RECIPE.model_copy(update={"stages": stages}), [videos], root)
    assert (first.clips, first.stages["tokenize"]["items"], first.pending) == (9, 5, 0)
    spoil(videos)
    second = {"use": "tokenize", "source": "payload", "codes": 4, "levels": 1, "fps": 10}
    both = run_job(RECIPE.model_copy(update={"stages": {**stages, "coarse": second}}), [videos], root)
    assert (both.decoded_videos, both.decoded_intervals, both.quarantined) == (0, 0, 0)
    assert both.stages["coarse"]["items"] == 5
    version = videoflow.open(root).version("x")
    with version.loader(
        batch_size=5, video=False, columns=["tokens", "coarse"], filter="tokens IS NOT NULL", epochs=1
    ) as loader:
        batch = next(loader)
    # Nine frames of the source's own rate; a clip of one second at 10 frames/s has ten; 48 pixels are six blocks high.
    assert batch["tokens"].shape[:4] == (5, 2, 9, 6)
    assert batch["coarse"].shape[:3] == (5, 10, 6)


def test_recipe_latents_as_it_ships(corpus: Path, tmp_path: Path) -> None:
    recipe = recipes.load("pipelines.latents:recipe")
    summary = run_job(recipe, [corpus / "cuts_bikes.mp4"], tmp_path / "cat")
    assert (summary.done, summary.quarantined) == (1, 0) and summary.clips >= 2
    version = videoflow.open(tmp_path / "cat").version("x")
    assert min(version.clips()["tokenize_psnr"].to_pylist()) > 20.0
    with version.loader(batch_size=2, video=False, columns=["tokens"], epochs=1) as loader:
        batch = next(loader)
    assert batch["tokens"].shape[1] == 2 and int(batch["tokens"].max()) < 256
    assert batch["tokens_valid"].shape == batch["tokens"][:, 0].shape


def test_a_damaged_codebook_is_one_line_with_the_remedy(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    run_job(RECIPE, [videos], root)
    (path,) = (p for p in (root / "fits").rglob("*") if p.is_file())
    path.write_text("{'no': 'codebook'}")
    with pytest.raises(
        DamagedCatalog, match=r"fits/tokenize/\w+ is damaged \(.*\); restore it from a backup, or remove"
    ):
        run_job(RECIPE, [videos], root)
    catalog = Catalog.open(root)
    used = {u.path: u for u in usage(catalog.root, catalog.ledger, now=datetime.now(UTC))}
    assert used["fits"].num_bytes == path.stat().st_size and not any("not the catalog" in name for name in used)


def test_a_caption_column_that_nobody_has_is_refused_and_gaps_are_told(videos: Path, tmp_path: Path) -> None:
    recipe, manifest = caption_recipe(tmp_path), tmp_path / "m.jsonl"
    write_manifest(manifest, videos, {"v0.mp4": "two ducks", "v1.mp4": "  ", "v2.mp4": "swim"})
    with pytest.raises(SourceError, match=r"stages.text: 'nosuch' is no column .*there are: caption"):
        run_job(recipe.with_settings(["text.column=nosuch"]), [manifest], tmp_path / "cat")
    with pytest.raises(SourceError, match="none; a manifest gives columns"):
        run_job(recipe, [videos], tmp_path / "cat")
    assert not (tmp_path / "cat" / "frames").exists()  # nothing was decoded for it
    progress = Quiet()
    run_job(recipe, [manifest], tmp_path / "cat", progress=progress)
    assert "text: 1 of 3 videos have nothing in the column caption" in progress.notes
