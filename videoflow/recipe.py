"""Recipes: sources + stages + selection, as YAML or Python; checked completely before any process starts.

name: clips
stages:
  frames: {fps: 8, short_side: 256}
  shots: {}
  clips: {max_seconds: 10}
  mine: {use: "my.package:Stage", level: 3}     # a stage of your own
split: {train: 0.98, val: 0.01, test: 0.01}
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from videoflow.errors import RecipeError, VideoflowError, nearest, shown
from videoflow.find import find_stage, load_object
from videoflow.fingerprint import fingerprint
from videoflow.stage import PassConsumer, SourceStage, Stage, StageParams, VideoStage

PIPELINE_GROUP = "videoflow.pipelines"
#: The stage that every recipe begins with: it measures what a video is.
PROBE = "probe"


@dataclass(frozen=True)
class BuiltStage:
    """One stage of a built recipe: its key in the recipe, the checked instance, its fingerprint."""

    key: str
    stage: Stage
    fingerprint: str

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def table(self) -> str:
        return self.stage.table


class Recipe(BaseModel):
    """What to compute and from what.

    Attributes:
        name: for people. sources: folders, globs, URLs, manifests; `--source` adds to them.
        stages: by key; each maps to its parameters, and ``use`` to a stage of your own.
        split: share of each split, by the hash of ``split_by`` (the video, or a metadata column).
        stream: container index of the video stream to decode; None takes the first that is no cover picture.
        decoder: who decodes, ``cpu`` or ``nvdec`` (NVIDIA's; what it cannot do to the bit is left to the CPU). Enters
            all fingerprints of the pass.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "recipe"
    description: str = ""
    sources: tuple[str, ...] = ()
    stages: dict[str, dict[str, Any]] = Field(min_length=1)
    split: dict[str, float] = Field(default_factory=lambda: {"train": 0.98, "val": 0.01, "test": 0.01})
    split_by: str = "video"
    stream: int | None = Field(None, ge=0)
    decoder: Literal["cpu", "nvdec"] = "cpu"

    @field_validator("stages", mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        return {k: ({} if v is None else v) for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("split")
    @classmethod
    def _shares(cls, value: dict[str, float]) -> dict[str, float]:
        total = sum(Fraction(str(v)) for v in value.values())
        if total != 1 or any(v < 0 for v in value.values()):
            raise ValueError(f"shares must be ≥ 0 and sum to 1, not {float(total)}")
        return value

    def build(self) -> tuple[BuiltStage, ...]:
        """Check every stage and its parameters; stages in the order they run.

        Raises:
            RecipeError: names the stage, the key and what is allowed.
        """
        wanted = {PROBE: {}, **self.stages}
        built = [_build_stage(key, params, self.decoder) for key, params in wanted.items()]
        return tuple(_in_order(built))

    def with_settings(self, settings: Iterable[str]) -> Recipe:
        """A copy with ``key=value`` settings applied: ``clips.max_seconds=5``, ``split.val=0.02``, ``stream=1``."""
        data = self.model_dump()
        for setting in settings:
            path, eq, text = setting.partition("=")
            keys = path.strip().split(".")
            if not eq or not all(keys):
                raise RecipeError(f"--set {setting!r} is not of the form key=value, e.g. clips.max_seconds=5")
            if keys[0] not in type(self).model_fields:
                keys = ["stages", *keys]
            if keys[0] == "stages" and (len(keys) < 3 or keys[1] not in data["stages"]):
                name = keys[-1] if len(keys) < 3 else keys[1]
                meant = nearest(name, [*data["stages"], *type(self).model_fields])
                raise RecipeError(
                    f"--set {shown(setting)}: no stage {shown(name)} in the recipe{meant}; it has "
                    f"{', '.join(data['stages'])}"
                )
            target = data
            for key in keys[:-1]:
                target = target.setdefault(key, {})
                if not isinstance(target, dict):
                    raise RecipeError(f"--set {setting!r}: {key} has no keys of its own")
            target[keys[-1]] = _yaml(text, f"--set {setting!r}")
        return parse(data, origin="--set")


def check_stage(key: str, params: dict[str, Any]) -> tuple[type[Stage], StageParams]:
    """A stage's class and its parameters, checked but not resolved: that is for the machine that will run it.

    Raises:
        RecipeError: names the stage, the key and what is allowed.
    """
    params = dict(params)
    use = params.pop("use", key)
    if not isinstance(use, str):
        raise RecipeError(f"stages.{key}.use must be a name or package.module:Class, not {use!r}")
    cls = find_stage(use)
    try:
        checked: StageParams = cls.Params.model_validate(params)
    except ValidationError as e:
        allowed = ", ".join(cls.Params.model_fields) or "none"
        told = _first_problem(e, f"stages.{key}", cls.Params.model_fields)
        raise RecipeError(f"{told} (parameters of {use}: {allowed})") from e
    return cls, checked


def _build_stage(key: str, params: dict[str, Any], decoder: str) -> BuiltStage:
    cls, checked = check_stage(key, params)
    stage = cls(cls.resolve(checked))
    if isinstance(stage, PassConsumer):
        stage.decoder = decoder
    return BuiltStage(key, stage, fingerprint(stage))


def _in_order(built: list[BuiltStage]) -> list[BuiltStage]:
    """Pass consumers first, then the others after the stages they read."""
    names = {b.name for b in built}
    for b in built:
        missing = [n for n in b.stage.required_inputs() if n not in names]
        if missing:
            raise RecipeError(
                f"stage {b.key!r} reads {', '.join(missing)}, which the recipe does not have; add it under stages:"
            )
    decoded_again = {b.name for b in built if isinstance(b.stage, SourceStage)}

    def rank(b: BuiltStage) -> int:
        kinds = (PassConsumer, VideoStage)
        found = next((r for r, kind in enumerate(kinds) if isinstance(b.stage, kind)), len(kinds))
        if isinstance(b.stage, SourceStage):  # its choice may ask for scores of the stages before it
            return found + 1
        return found + 2 * bool(decoded_again & set(b.stage.inputs)) if found == len(kinds) else found

    return sorted(built, key=rank)


def parse(data: Any, *, origin: str) -> Recipe:
    """A recipe from plain data; errors name ``origin`` and the key."""
    if isinstance(data, Recipe):
        return data
    if not isinstance(data, dict):
        raise RecipeError(f"{origin}: a recipe is a mapping with the key stages, not {type(data).__name__}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as e:
        raise RecipeError(
            f"{origin}: {_first_problem(e, '', Recipe.model_fields)} "
            f"(keys of a recipe: {', '.join(Recipe.model_fields)})"
        ) from e


def load(name_or_path: str) -> Recipe:
    """A recipe by name (entry points ``videoflow.pipelines``), YAML or Python file, or ``package.module:name``.

    Raises:
        RecipeError: not found, not readable, or not a valid recipe.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".py") or os.path.isfile(path):
        if not os.path.isfile(path):
            why = ": it is a folder" if os.path.isdir(path) else ""
            raise RecipeError(f"no recipe file {name_or_path}{why}")
        return parse(_python(path) if path.suffix == ".py" else _yaml(_read(path), name_or_path), origin=name_or_path)
    if ":" in name_or_path:
        return parse(load_object(name_or_path, what="recipe"), origin=name_or_path)
    known = {e.name: e.value for e in entry_points(group=PIPELINE_GROUP)}
    if name_or_path not in known:
        raise RecipeError(
            f"no recipe {shown(name_or_path)}{nearest(name_or_path, known)}: known are "
            f"{', '.join(sorted(known)) or 'none'}; or give a .yaml or .py file"
        )
    return parse(load_object(known[name_or_path], what="recipe"), origin=name_or_path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise RecipeError(f"cannot read recipe {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise RecipeError(f"recipe {path} is no text: a recipe is YAML in UTF-8, or Python in a file named .py") from e


def _yaml(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: a date that does not exist
        raise RecipeError(f"{origin} is not YAML: {' '.join(str(e).split())}") from e


def _python(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's own answer
            spec.loader.exec_module(module)
    except VideoflowError:
        raise
    except (Exception, SystemExit) as e:  # whatever the user's file raises is the user's to see, as one line
        raise RecipeError(f"recipe {path} fails: {type(e).__name__}: {e}") from e
    if not hasattr(module, "recipe"):
        raise RecipeError(f"recipe {path} defines no name `recipe`")
    return module.recipe


def _first_problem(e: ValidationError, prefix: str, allowed: Iterable[str]) -> str:
    problem = e.errors()[0]
    where = ".".join(str(p) for p in ([prefix] if prefix else []) + list(problem["loc"]))
    more = f" (and {e.error_count() - 1} more)" if e.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where}{nearest(problem['loc'][-1], allowed)}{more}"
    told = str(problem["msg"]).removeprefix("Value error, ")  # pydantic's own words for ours
    return f"{where}: {told}, given {shown(problem['input'])}{more}"
