"""Properties of fingerprints: the same in every process and for any order of keys, another for every parameter of every
stage. Parameters are found, not listed: one that is added later is tested too.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from videoflow.errors import VideoflowError
from videoflow.find import find_stage, known_stages
from videoflow.fingerprint import clip_item_key, components, fingerprint, pass_item_key, video_item_key
from videoflow.keys import digest
from videoflow.stage import Stage

pytest.importorskip("torch")
#: Every parameter that means something: a field that is left out is a place, and what lies there enters by its digest.
FIELDS = [
    (name, key)
    for name in sorted(known_stages())
    for key, field in find_stage(name).Params.model_fields.items()
    if not field.exclude
]


def others(field: FieldInfo) -> Iterator[Any]:
    """Values a field might take beside its default; the model says which of them it allows."""
    if field.default is not None:
        yield field.default
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if kind is bool:
            yield from (True, False)
        elif kind in (int, float):
            base = field.default if isinstance(field.default, (int, float)) else 1
            yield from (base * 2, base / 2 if kind is float else base // 2, base + 1, 5, 64, 500)
        elif kind is str:
            yield from ("4", "2", "1/3", "tests.workers.test_embed:make_bright", "tests.workers.test_text:make_lengths")
        elif typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
    if field.annotation is not None and typing.get_origin(field.annotation) is typing.Literal:
        yield from typing.get_args(field.annotation)


def made(name: str, values: dict[str, Any]) -> str | None:
    """The fingerprint, None where the stage refuses these parameters or cannot be had here."""
    cls = find_stage(name)
    try:
        return fingerprint(cls(cls.resolve(cls.Params.model_validate(values))))
    except (ValidationError, VideoflowError, ValueError):
        return None


def pairs(name: str, field: str) -> Iterator[tuple[str, str]]:
    """Fingerprints that differ in nothing but one field, from several starting points."""
    fields = find_stage(name).Params.model_fields
    helpers = [{}, *({k: v} for k in fields if k != field for v in others(fields[k]))]
    both = [{**a, **b} for a, b in itertools.combinations(helpers[1:], 2)]
    for base in (*helpers, *both):
        found = {json.dumps(v): fp for v in others(fields[field]) if (fp := made(name, {**base, field: v}))}
        resolved = {
            repr(find_stage(name).resolve(find_stage(name).Params.model_validate({**base, field: json.loads(v)})))
            for v in found
        }
        if len(resolved) > 1:
            yield len(resolved), len(set(found.values()))  # type: ignore[misc]
            return


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=str)
def test_every_semantic_parameter_of_every_stage_changes_the_fingerprint(name: str, field: str) -> None:
    ((values, fingerprints),) = pairs(name, field)
    assert values == fingerprints > 1


def test_every_part_of_the_components_counts() -> None:
    frames = find_stage("frames")()
    base = components(frames)
    for change in (
        {"stage": "framez"},
        {"version": base["version"] + 1},
        {"identity": {**base["identity"], "decoder": "0" * 32}},
        {"schema": base["schema"][:-1]},
        {"params": {**base["params"], "fps": "9"}},
    ):
        assert digest({**base, **change}) != fingerprint(frames) == digest(base)


PARAMS = {
    "frames": st.fixed_dictionaries(
        {},
        optional={
            "fps": st.sampled_from(["8", "30000/1001", "1/2", 4]),
            "short_side": st.integers(16, 4096),
            "quality": st.integers(1, 100),
            "chunk_seconds": st.integers(1, 60),
        },
    ),
    "clips": st.fixed_dictionaries(
        {},
        optional={"min_seconds": st.floats(0, 3), "max_seconds": st.floats(3, 60), "threshold": st.integers(0, 1000)},
    ),
}


@given(st.sampled_from(sorted(PARAMS)).flatmap(lambda n: st.tuples(st.just(n), PARAMS[n])), st.randoms())
def test_the_order_of_keys_means_nothing(case: tuple[str, dict[str, Any]], rng: Any) -> None:
    name, values = case
    keys = list(values)
    rng.shuffle(keys)
    assert made(name, {k: values[k] for k in keys}) == made(name, values) is not None


def test_they_are_equal_in_other_process_with_another_hash_seed() -> None:
    cases = [
        ("frames", {"fps": "30000/1001", "quality": 77}),
        ("clips", {"max_seconds": 0.1 + 0.2, "min_seconds": 1e-3}),
        ("shots", {"detector": "hsv"}),
        ("quality", {"fps": 3}),
        ("probe", {}),
    ]
    here = [made(name, values) for name, values in cases]
    assert None not in here
    code = (
        "import json, sys; from tests.test_fingerprint import made; print(*(made(*c) for c in json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, json.dumps(cases)]
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split() == here


KEYS = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(KEYS, KEYS, KEYS, st.fractions(0, 9), st.fractions(10, 20))
def test_item_keys_depend_on_all_that_they_are_made_of(video: str, other: str, fp: str, a: Any, b: Any) -> None:
    assert len({pass_item_key(video, s, fp) for s in (None, *range(10))}) == 11
    intervals = ((), ((a, b),), ((a, b), (a, b + 1)), ((a, b + 1), (a, b)))
    assert len({video_item_key(video, other, i, fp) for i in intervals}) == 4
    if video != other:
        assert pass_item_key(video, None, fp) != pass_item_key(other, None, fp)
        assert video_item_key(video, fp, (), fp) != video_item_key(other, fp, (), fp)
        assert clip_item_key(video, other, fp) != clip_item_key(other, video, fp)


def test_all_installed_stages_are_looked_at() -> None:
    assert {n for n, _ in FIELDS} >= {"frames", "shots", "quality", "clips", "embed"}
    assert all(issubclass(find_stage(n), Stage) for n in known_stages())


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.none() | st.integers(0, 99))
def test_item_keys_are_digests_of_their_parts(key: str, stream: int | None) -> None:
    """They are written without a JSON encoder, a million at a time; the catalogs that are there hold these keys."""
    assert pass_item_key(key, stream, "f" * 32) == digest("video", key, stream, "f" * 32)
    assert clip_item_key(key, key[::-1], "f" * 32) == digest("clip", key, key[::-1], "f" * 32)
