"""Odd roots, recipes, options: each ends before anything starts, in one line that names it, with the right exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import videoflow
from tests.jobs import Quiet, run_job
from videoflow.cli.output import json_line, tell_damage
from videoflow.dataset.publish import content_digest
from videoflow.errors import DamagedCatalog, InputError, RecipeError
from videoflow.execute import JobOptions
from videoflow.recipe import Recipe
from videoflow.testing import make_barcode_video

CHEAP = "stages: {frames: {}, shots: {detector: hsv}, clips: {by: windows, window_seconds: 1}}"
STAGES: dict[str, Any] = {"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "in"
    folder.mkdir()
    make_barcode_video(folder / "a.mp4", num_frames=40)
    (folder.parent / "r.yaml").write_text(CHEAP)
    return folder


@pytest.fixture
def run(call: Call, videos: Path, tmp_path: Path) -> Call:
    """``run`` or ``plan`` with one thing changed; whatever is wrong is one line on stderr, and nothing was made."""

    def go(command: str, *, recipe: object = videos.parent / "r.yaml", **changed: object) -> Any:
        options = {"source": videos, "root": tmp_path / "cat", "name": "x", "engine": "local", **changed}
        args = [v for k, value in options.items() for v in (f"--{k.replace('_', '-')}", value)]
        answer = call(command, recipe, *args)
        if answer.code not in (0, 3):
            *printed, line = answer.err.strip().splitlines()
            assert printed in ([], ["hi"])  # what the recipe itself prints
            assert line.startswith("videoflow: ") and not answer.out
            assert not (tmp_path / "cat").exists()
        return answer

    return go


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("", "the root is empty"),
        ("  ", "the root is empty"),
        ("/dev/null", "/dev/null is no folder"),
        ("/dev/null/deep/er", "/dev/null is no folder"),
        ("new\nline", "control character"),
        ("bad\udcff", "no UTF-8"),
    ],
)
def test_roots_that_are_none(run: Call, command: str, root: str, says: str) -> None:
    before = set(os.listdir())
    answer = run(command, root=root)
    assert answer.code == 2 and says in answer.err
    assert set(os.listdir()) == before


def test_a_root_that_cannot_be_made_is_the_systems_fault(run: Call) -> None:
    answer = run("run", root="/proc/nowhere/cat")
    assert answer.code == 4 and "cannot make the folder /proc/nowhere/cat" in answer.err


def test_a_root_with_an_odd_name_below_folders_that_are_not_there_works(
    run: Call, call: Call, tmp_path: Path, videos: Path
) -> None:
    root = tmp_path / "not" / "there" / "a b'c\"d%20e#f?g é*[h]"
    source = tmp_path / "s p'a%c#e?\n é"
    source.mkdir()
    os.link(videos / "a.mp4", os.fsencode(source) + b"/b\xffad%20#?.mp4")
    answer = run("run", root=root, source=source)
    assert answer.code == 0, answer.err
    assert [r["version"] for r in call("versions", root, "--json").rows] == ["x@1"]
    assert call("query", root, "x", "SELECT uri FROM clips", "--json").rows[0]["uri"].endswith("b\\xffad%20#?.mp4")
    with videoflow.open(root).version("x").loader(batch_size=1, frames=2, epochs=1) as loader:
        assert len(list(loader)) == 1


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"engine": "lokal"}, "unknown engine 'lokal' (did you mean local?)"),
        ({"engine": ""}, "unknown engine"),
        ({"workers": 0}, "--workers 0 must be a whole number from 1 to 1024"),
        ({"workers": -1}, "--workers -1"),
        ({"workers": 10**9}, "--workers 1000000000"),
        ({"name": ""}, "version name ''"),
        ({"name": "a b"}, "version name"),
        ({"name": "x@1"}, "version name"),
        ({"name": "../x"}, "version name"),
        ({"name": "a\n"}, "version name"),
        ({"name": "x" * 101}, "version name"),
        ({"max_quarantined": "nan%"}, "--max-quarantined"),
        ({"max_quarantined": "10%%"}, "--max-quarantined"),
        ({"max_quarantined": ""}, "--max-quarantined"),
        ({"max_quarantined": "inf"}, "--max-quarantined"),
        ({"set": "frames.fpz=4"}, "unknown key stages.frames.fpz (did you mean fps?)"),
        ({"set": "frame.fps=4"}, "no stage 'frame' in the recipe (did you mean frames?)"),
        ({"set": "frames.fps=2024-13-45"}, "is not YAML"),
        ({"recipe": "clps"}, "no recipe 'clps' (did you mean clips?)"),
    ],
)
def test_options_that_are_none(run: Call, command: str, changed: dict[str, object], says: str) -> None:
    answer = run(command, **changed)
    assert answer.code == 2 and says in answer.err, answer.err


@pytest.mark.parametrize("memory", ["1", "0", "1MB", "255MiB", "x", "-1", "9999999TB"])
def test_memory_that_no_decoding_process_fits_into(run: Call, memory: str) -> None:
    answer = run("run", memory=memory)
    assert answer.code == 2 and "--memory" in answer.err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.py", b"import sys\nprint('hi')\nsys.exit(3)", "r.py fails: SystemExit: 3"),
        ("r.py", b"1 / 0", "r.py fails: ZeroDivisionError"),
        ("r.py", b"def (", "r.py fails: SyntaxError"),
        ("r.py", b"\xff\xfe\x00", "r.py fails: SyntaxError"),
        ("r.py", b"x = 1", "defines no name `recipe`"),
        ("r.py", b"recipe = 3", "a recipe is a mapping"),
        ("r.yaml", b"\xff\xfe\x00\x01", "is no text"),
        ("r.yaml", b"a\x00b", "is not YAML"),
        ("r.yaml", b"", "a recipe is a mapping"),
        ("r.yaml", b"- frames", "a recipe is a mapping"),
        ("r.yaml", b"stages: {frames: {}}\nsteam: 1", "unknown key steam (did you mean stream?)"),
        ("r.yaml", b"stages: {framez: {}}", "unknown stage 'framez' (did you mean frames?)"),
        ("r.yaml", b"stages: {x: {use: 'tests.cli.exits:Stage'}}", "importing tests.cli.exits fails: SystemExit"),
        ("r.yaml", None, "it is a folder"),
    ],
)
def test_recipes_that_are_none(run: Call, tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    if name == "r.py":
        with pytest.raises(RecipeError):  # the same from Python
            videoflow.recipe.load(str(path))
    answer = run("plan", recipe=path)
    assert answer.code == 2 and says in answer.err, answer.err


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "2"}, {"workers": True}, {"workers": 1.5}, {"memory_bytes": 1}, {"memory_bytes": 1e9},
        {"max_quarantined": float("nan")}, {"max_quarantined": "10%"}, {"max_quarantined": 10}, {"engine": None},
    ],
)  # fmt: skip
def test_job_options_of_wrong_types(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        JobOptions(**options)


# ── nothing to publish ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_version_is_never_published(run: Call, call: Call, tmp_path: Path) -> None:
    assert run("run").code == 0
    for setting, says in (("stream=7", "stream 7"), ("clips.window_seconds=100", "no clip is left")):
        more = (
            {"set": setting}
            if "stream" in setting
            else {"set": "clips.min_seconds=50", "recipe": long_windows(tmp_path)}
        )
        answer = run("run", **more)
        assert answer.code == 3 and "no version is published" in answer.err and says in answer.err, answer.err
        assert "version   none" in answer.out
    assert [r["version"] for r in call("versions", tmp_path / "cat", "--json").rows] == ["x@1"]


def long_windows(tmp_path: Path) -> Path:
    path = tmp_path / "long.yaml"
    path.write_text(CHEAP.replace("window_seconds: 1", "window_seconds: 100"))
    return path


def test_a_recipe_without_clips_says_that_it_makes_no_version(videos: Path, tmp_path: Path) -> None:
    progress = Quiet()
    summary = run_job(Recipe(stages={"frames": {}}), [videos], tmp_path / "cat", progress=progress)
    assert (summary.exit_code, summary.version) == (0, None)
    assert "no version is published: the recipe has no stages frames and clips" in progress.notes


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_is_strict() -> None:
    value = {"a": float("nan"), "b": [float("inf"), {"c": (1.5, -float("inf"))}], 3: b"x", "s": "\udcff"}
    line = json_line(value)
    assert json.loads(line, parse_constant=pytest.fail) == {
        "a": None, "b": [None, {"c": [1.5, None]}], "3": "b'x'", "s": "\udcff",
    }  # fmt: skip
    line.encode("ascii")
    with pytest.raises(DamagedCatalog, match=r"^two$"):
        tell_damage(["one", "two"])
    tell_damage([])


def test_an_error_leaves_stdout_to_json(run: Call, call: Call, tmp_path: Path) -> None:
    assert run("run").code == 0
    for args in (("query", "SELECT 'nan'::float AS a, 1/0.0 AS b"), ("query", "SELEC"), ("search",)):
        answer = call(args[0], tmp_path / "cat", "x", *(args[1:] or ("--clip", "nope")), "--json")
        for line in answer.out.splitlines():
            json.loads(line, parse_constant=pytest.fail)
        assert bool(answer.code) == bool(answer.err.strip()) and len(answer.err.strip().splitlines()) <= 1


def test_scores_that_are_no_numbers_have_a_digest() -> None:
    table = pa.table({"clip_key": ["a", "b"], "score": [float("nan"), float("inf")]})
    other = pa.table({"clip_key": ["a", "b"], "score": [float("nan"), -float("inf")]})
    assert content_digest(table, {}) == content_digest(table, {}) != content_digest(other, {})


def test_names_of_files_do_not_steer_the_terminal(call: Call, run: Call, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    name = "esc\x1b[31m\nred \u202egpj.mp4"
    (tmp_path / "odd" / name).write_bytes(b"no video")
    run("run", source=tmp_path / "odd")
    listed = call("quarantine", "list", tmp_path / "cat").out
    assert "esc\\x1b[31m\\nred \\u202egpj.mp4" in listed and "\x1b" not in listed
    (row,) = call("quarantine", "list", tmp_path / "cat", "--json").rows
    assert Path(row["uri"]).name == name


@pytest.mark.parametrize("setting", ["frames.short_side=true", "clips.window_seconds=yes", "frames.quality=false"])
def test_true_is_no_number(run: Call, setting: str) -> None:
    answer = run("run", set=setting)
    assert answer.code == 2 and "is no number" in answer.err and setting.split("=", maxsplit=1)[0] in answer.err


def test_jobs_says_why_one_stopped(call: Call, videos: Path, tmp_path: Path) -> None:
    run_job(Recipe(stages=STAGES), [videos], tmp_path / "cat")
    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    job = json.loads(record.read_text()) | {"state": "stopped", "error": "KeyError: 'lavfi'\nmore"}
    record.write_text(json.dumps(job))
    assert "; KeyError: 'lavfi'" in call("jobs", tmp_path / "cat").out
