"""Why something is computed: `explain`, and the stale column of `plan`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import videoflow
from tests.jobs import run_job
from videoflow.dataset.catalog import Catalog
from videoflow.errors import QueryError
from videoflow.explain import answers, find_subject, verdicts
from videoflow.forecast import StageForecast, forecast
from videoflow.history import UNKNOWN, changed_components
from videoflow.identify import identify
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.testing import make_barcode_video

SCORER = "tests.cli.scorer:MeanLuma"
RECIPE = Recipe(
    stages={
        "frames": {},
        "shots": {"detector": "hsv"},
        "clips": {"by": "windows", "window_seconds": 1},
        "luma": {"use": SCORER},
    }
)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    for i in range(2):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=45, offset=100 * i)
    (folder / "bad.mp4").touch()
    return folder


@pytest.fixture(scope="module")
def made(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("explained") / "cat"
    run_job(RECIPE, [videos], root, workers=1)
    return root


@pytest.fixture
def catalog(made: Path, tmp_path: Path) -> Catalog:
    return Catalog.open(shutil.copytree(made, tmp_path / "cat"))


def forecasts(catalog: Catalog, videos: Path, *settings: str) -> dict[str, StageForecast]:
    recipe = RECIPE.with_settings(settings)
    found = identify(catalog, scan([str(videos)]), job=None)
    return {f.stage: f for f in forecast(Plan(catalog.root, catalog.ledger, recipe, recipe.build(), found.videos))}


def test_plan_counts_what_is_stale_and_names_the_component(catalog: Catalog, videos: Path) -> None:
    same = forecasts(catalog, videos)
    assert all((f.stale, f.to_compute, f.changed) == (0, 0, ()) for f in same.values())

    fewer = forecasts(catalog, videos, "frames.fps=4", "frames.quality=80")
    assert (fewer["frames"].to_compute, fewer["frames"].stale) == (2, 2)
    assert fewer["frames"].changed == ("params.fps", "params.quality")
    assert (fewer["shots"].to_compute, fewer["shots"].stale) == (0, 0)
    assert (fewer["luma"].to_compute, fewer["luma"].unknown) == (0, 2)  # shows once the frames are there

    longer = forecasts(catalog, videos, "clips.window_seconds=0.5")
    assert (longer["clips"].to_compute, longer["clips"].stale, longer["clips"].changed) == (
        2,
        2,
        ("params.window_seconds",),
    )
    assert {s: f.to_compute for s, f in longer.items() if s != "clips"} == {
        "probe": 0,
        "frames": 0,
        "shots": 0,
        "luma": 0,
    }

    scored = forecasts(catalog, videos, "luma.gain=2.0")
    assert (scored["luma"].to_compute, scored["luma"].stale, scored["luma"].changed) == (4, 4, ("params.gain",))


def test_a_new_video_and_a_new_stage_are_not_stale(catalog: Catalog, videos: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(videos, more)
    make_barcode_video(more / "new.mp4", num_frames=30, offset=900)
    assert {s: (f.to_compute, f.stale) for s, f in forecasts(catalog, more).items()} == {
        "probe": (1, 0),
        "frames": (1, 0),
        "shots": (1, 0),
        "clips": (0, 0),
        "luma": (0, 0),
    }
    quality = RECIPE.model_copy(update={"stages": {**RECIPE.stages, "quality": {}}})
    found = identify(catalog, scan([str(videos)]), job=None)
    plan = Plan(catalog.root, catalog.ledger, quality, quality.build(), found.videos)
    by_stage = {f.stage: (f.to_compute, f.stale) for f in forecast(plan)}
    assert by_stage["quality"] == (2, 0)


def test_another_input_is_named_as_such(catalog: Catalog, videos: Path) -> None:
    """With frames of another rate, the scorer's clips are made from another input; its own fingerprint is the same."""
    slower = RECIPE.with_settings(["frames.fps=4"])
    stages = {k: v for k, v in slower.stages.items() if k != "luma"}
    run_job(slower.model_copy(update={"stages": stages}), [videos], catalog.root.url, name="y", workers=1)
    luma = forecasts(catalog, videos, "frames.fps=4")["luma"]
    assert (luma.to_compute, luma.stale, luma.changed) == (4, 4, ("input",))


def test_components_of_fingerprints() -> None:
    old = {"version": 1, "params": {"a": 1, "b": None}, "identity": {"weights": "x"}, "schema": [["k", "string"]]}
    assert changed_components(old, {**old, "version": 2}) == ("stage version",)
    assert changed_components(old, {**old, "params": {"a": 2}}) == ("params.a", "params.b")
    new = {**old, "identity": {"weights": "y", "decoder": "d"}, "schema": []}
    assert changed_components(old, new) == ("identity.decoder", "identity.weights", "schema")
    assert changed_components(None, old) == (UNKNOWN,)


def test_fingerprints_are_explained_beside_their_tables(catalog: Catalog) -> None:
    for built in RECIPE.build():
        note = catalog.root.get_json(f"{built.table}/{built.fingerprint}/fingerprint.json")
        assert note is not None and note["stage"] == built.name
        assert note["grain"] == {"clips": "rows", "mean_luma": "clip"}.get(built.name, "pass")


def test_subjects(catalog: Catalog, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(videos / "v0.mp4")
    key = catalog.known_sources()[uri].video_key
    clip = videoflow.open(catalog.root.url).version("x").sql(f"SELECT clip_key FROM clips WHERE uri = '{uri}'")
    clip_key = clip["clip_key"][0].as_py()
    by_uri, by_key = find_subject(catalog, uri), find_subject(catalog, key)
    assert by_uri == by_key and (by_uri.video_key, by_uri.uris, by_uri.clip_key) == (key, (uri,), None)
    assert find_subject(catalog, clip_key) == type(by_uri)(key, (uri,), clip_key)
    monkeypatch.chdir(videos)
    assert find_subject(catalog, "v0.mp4") == by_uri
    for unknown in ("nothing", "0" * 32, "x' OR '1'='1"):
        with pytest.raises(QueryError, match="no uri, video key or clip key"):
            find_subject(catalog, unknown)

    whole = {a.stage: a for a in answers(catalog, by_uri)}
    assert list(whole) == ["probe", "frames", "shots", "clips", "mean_luma"]
    assert whole["mean_luma"].items == {"done": 2} and whole["frames"].rows == 1
    of_clip = {a.stage: a for a in answers(catalog, find_subject(catalog, clip_key))}
    assert of_clip["mean_luma"].items == {"done": 1} and of_clip["clips"].rows == 2
    bad = answers(catalog, find_subject(catalog, "bad.mp4"))
    assert {(a.state, a.reason) for a in bad} == {("quarantined", "empty")}


def test_verdicts_say_why(catalog: Catalog, videos: Path) -> None:
    video = find_subject(catalog, str(videos / "v0.mp4"))
    assert [v.what for v in verdicts(catalog, video, RECIPE)] == ["cached: done"] * 4 + ["cached: 2 done"]
    fewer = {v.stage: v for v in verdicts(catalog, video, RECIPE.with_settings(["frames.fps=4"]))}
    assert fewer["frames"].changed == ("params.fps",) and fewer["frames"].what.startswith("computed again: params.fps")
    assert fewer["clips"].what == "cached: done" and fewer["luma"].what.startswith("waits for frames")
    louder = {v.stage: v for v in verdicts(catalog, video, RECIPE.with_settings(["luma.gain=2.0"]))}
    assert louder["luma"].what.startswith("2 of 2 items computed again: params.gain changed")
    quality = RECIPE.model_copy(update={"stages": {**RECIPE.stages, "quality": {}}})
    new = {v.stage: v for v in verdicts(catalog, video, quality)}
    assert new["quality"].what == "computed: never computed before"
    assert new["clips"].what.startswith("waits for")
    bad = {v.stage: v.what for v in verdicts(catalog, find_subject(catalog, str(videos / "bad.mp4")), RECIPE)}
    assert "empty" in bad["probe"] and "quarantine retry" in bad["probe"] and "quarantined" in bad["frames"]

    clip_key = videoflow.open(catalog.root.url).version("x").clips(columns=["clip_key"])["clip_key"][0].as_py()
    clip = find_subject(catalog, clip_key)
    assert {v.stage: v.cached for v in verdicts(catalog, clip, RECIPE)}["luma"] == 1
    other = {v.stage: v.what for v in verdicts(catalog, clip, RECIPE.with_settings(["clips.window_seconds=0.5"]))}
    assert other["luma"].startswith("waits for clips")


def test_a_catalog_without_notes_says_that_it_does_not_know(catalog: Catalog, videos: Path) -> None:
    for note in Path(catalog.root.url).glob("*/*/fingerprint.json"):
        note.unlink()
    assert forecasts(catalog, videos, "frames.fps=4")["frames"].changed == (UNKNOWN,)


def test_the_commands(call, catalog: Catalog, videos: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(RECIPE.model_dump(mode="json")))
    args = ["explain", catalog.root.url, videos / "v0.mp4", "--recipe", recipe, "--set", "frames.fps=4"]
    said = call(*args)
    assert said.code == 0 and "computed again: params.fps changed since" in said.out and "cached: done" in said.out
    rows = call(*args, "--json").rows
    assert [r["kind"] for r in rows] == ["subject"] + ["ledger"] * 5 + ["verdict"] * 5
    assert {r["stage"]: r["changed"] for r in rows if r["kind"] == "verdict"}["frames"] == ["params.fps"]
    assert call("explain", catalog.root.url, "nothing").code == 2
    options = ["--source", videos, "--root", catalog.root.url, "--name", "x", "--set", "frames.fps=4"]
    planned = call("plan", recipe, *options)
    (frames,) = [line.split() for line in planned.out.splitlines() if line.startswith("frames ")]
    assert frames == ["frames", "videos", "0", "2", "2", "1", "params.fps"]
    (stage,) = [s for s in call("plan", recipe, *options, "--json").rows[0]["stages"] if s["stage"] == "frames"]
    assert (stage["stale"], stage["changed"]) == (2, ["params.fps"])


def test_clips_that_a_manifest_asked_for_are_known(videos: Path, tmp_path: Path) -> None:
    """Their item is that of the run, intervals included, so it is cached; a recipe without them cuts other clips."""
    manifest = tmp_path / "m.csv"
    a, b = videos / "v0.mp4", tmp_path / "same.mp4"
    shutil.copy(a, b)
    manifest.write_text(f"uri,start,end,note\n{a},0.1,0.7,x\n{a},0.5,1.2,x\n{b},0.25,0.75,y\n")
    summary = run_job(RECIPE, [manifest], tmp_path / "cat", workers=1)
    assert summary.clips == 3
    catalog = Catalog.open(tmp_path / "cat")
    rows = catalog.version("x").clips().to_pylist()
    assert sorted(r["segment"] for r in rows) == [0, 1, 2]
    for key in [str(a), *(r["clip_key"] for r in rows)]:
        subject = find_subject(catalog, key)
        told = {v.stage: v for v in verdicts(catalog, subject, RECIPE)}
        assert all(v.what.startswith("cached") for v in told.values()), told
        assert told["luma"].cached == (3 if subject.clip_key is None else 1)
