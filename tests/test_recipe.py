"""Recipes: what is wrong is named before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoflow import recipe as recipes
from videoflow.errors import RecipeError
from videoflow.find import find_stage
from videoflow.fingerprint import fingerprint
from videoflow.keys import canonical_json, digest
from videoflow.recipe import Recipe
from videoflow.stage import ClipStage, Margin, PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return str(path)


def test_yaml_and_python_give_the_same_recipe(tmp_path: Path) -> None:
    from_yaml = recipes.load(write(tmp_path, "stages:\n  frames: {fps: 4}\n  clips: {}\n  shots:\n"))
    python = tmp_path / "r.py"
    python.write_text(
        "from videoflow import Recipe\nrecipe = Recipe(stages={'frames': {'fps': 4}, 'clips': {}, 'shots': {}})\n"
    )
    assert recipes.load(str(python)) == from_yaml


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: {frames: {fpz: 4}}", "stages.frames.fpz"),
        ("stages: {frames: {fps: -1}}", "stages.frames.fps"),
        ("stages: {frames: {quality: high}}", "stages.frames.quality"),
        ("stages: {frames: {}}\nsplits: {}", "splits"),
        ("stages: {framez: {}}", "unknown stage 'framez'"),
        ("stages: {clips: {}}", "reads shots"),
        ("stages: {x: {use: nowhere.at.all:Stage}}", "cannot import"),
        ("stages: {x: {use: 'videoflow.keys:digest'}}", "not a subclass"),
        ("stages: {frames: {}}\nsplit: {train: 0.5}", "sum to 1"),
        ("stages: [frames]", "stages"),
        ("- a", "mapping"),
        ("stages: {a: [", "not YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says.replace("(", r"\(")):
        recipes.load(write(tmp_path, text)).build()


def test_unknown_recipes_name_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="clips"):
        recipes.load("clipz")
    with pytest.raises(RecipeError, match="no recipe file"):
        recipes.load("nowhere.yaml")


def test_set_changes_one_parameter() -> None:
    recipe = recipes.load("clips").with_settings(["clips.max_seconds=5", "frames.fps=4", "stream=1"])
    assert recipe.stages["clips"]["max_seconds"] == 5 and recipe.stream == 1
    for bad in ("clips", "=3", "nostage.x=1", "clips.max_seconds"):
        with pytest.raises(RecipeError):
            recipes.load("clips").with_settings([bad])


def test_pass_consumers_come_first_and_the_probe_is_always_there() -> None:
    built = Recipe(stages={"clips": {}, "shots": {"detector": "hsv"}, "frames": {}}).build()
    assert [b.key for b in built] == ["probe", "shots", "frames", "clips"]


@given(st.permutations(["fps", "short_side", "quality", "chunk_seconds"]))
def test_fingerprints_do_not_depend_on_the_order_of_keys(order: list[str]) -> None:
    values = {"fps": 8, "short_side": 256, "quality": 90, "chunk_seconds": 4}
    cls = find_stage("frames")
    assert fingerprint(cls(cls.Params.model_validate({k: values[k] for k in order}))) == fingerprint(cls(cls.Params()))


@pytest.mark.parametrize(("key", "value"), [("fps", 4), ("short_side", 128), ("quality", 80), ("chunk_seconds", 2)])
def test_every_parameter_changes_the_fingerprint(key: str, value: int) -> None:
    cls = find_stage("frames")
    assert fingerprint(cls(cls.Params.model_validate({key: value}))) != fingerprint(cls(cls.Params()))


def test_fingerprints_are_equal_in_another_process() -> None:
    code = "from videoflow import recipe as r; print(*(b.fingerprint for b in r.load('clips').build()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert other == [b.fingerprint for b in recipes.load("clips").build()]


def test_rates_that_mean_the_same_are_the_same() -> None:
    cls = find_stage("frames")
    assert (
        cls.Params.model_validate({"fps": 8.0})
        == cls.Params.model_validate({"fps": "8"})
        == cls.Params.model_validate({"fps": "16/2"})
    )


def test_keys_are_blake3_of_canonical_json() -> None:
    # Golden value: printf '["a",1]' | b3sum, first 32 characters.
    assert canonical_json(["a", 1]) == b'["a",1]'
    assert digest("a", 1) == digest(*["a", 1]) and len(digest("a")) == 32
    with pytest.raises(ValueError):
        digest(float("nan"))


class Incomplete(ClipStage):
    name, version = "incomplete", 1


class Whole(ClipStage):
    """A user's own stage."""

    name, version, table = "whole", 1, "whole"

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def process(self, clips: object) -> list:
        return []


def test_a_users_stage_is_checked_when_the_recipe_is_built() -> None:
    with pytest.raises(RecipeError, match="lacks table"):
        find_stage("tests.test_recipe:Incomplete")
    assert find_stage("tests.test_recipe:Whole") is Whole


def test_a_stage_that_could_be_cut_but_not_joined_is_refused() -> None:
    with pytest.raises(RecipeError, match="has a margin, so that videos are cut between workers, but no join"):
        find_stage("tests.test_recipe:NoJoin")


class NoJoin(PassConsumer):
    name, version, table = "no_join", 1, "no_join"

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def begin(self, video: VideoHeader) -> None: ...

    def see(self, frame: ShownFrame) -> None: ...

    def finish(self, summary: VideoSummary) -> Product:
        return Product()

    def margin(self) -> Margin:
        return Margin()
