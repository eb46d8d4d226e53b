"""What travels with a job to a cluster, and what is refused before it does."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from videoflow import recipe as recipes
from videoflow import submission as submissions
from videoflow.errors import InputError, RecipeError
from videoflow.recipe import Recipe
from videoflow.submission import MAX_PACKAGE_BYTES, Submission, check_places, submission_of_resume, submission_of_run

RECIPE = Recipe(name="mine", stages={"frames": {"fps": 4}, "shots": {"detector": "hsv"}})
SECRET = "https://user:pw@host/videos/a.mp4?X-Signature=abc"


def content(s: Submission) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(s.package)) as z:
        return {n: z.read(n) for n in z.namelist()}


def made(recipe: Recipe = RECIPE, sources: list[str] | None = None, **more: object) -> Submission:
    return submission_of_run(recipe, sources or ["s3://b/in"], root="s3://b/cat", name="demo", **more)  # type: ignore[arg-type]


def test_a_recipe_travels_as_data_with_its_sources() -> None:
    recipe = RECIPE.model_copy(update={"sources": ("s3://b/first",)})
    s = made(recipe, options=["--engine", "ray"])
    assert sorted(content(s)) == ["launch.sh", "recipe.yaml"]
    arrived = recipes.parse(yaml.safe_load(content(s)["recipe.yaml"]), origin="x")
    assert arrived == recipe.model_copy(update={"sources": ("s3://b/first", "s3://b/in")})
    command = ["sh", "launch.sh", "run", "recipe.yaml", "--root", "s3://b/cat", "--name", "demo", "--engine", "ray"]
    assert shlex.split(s.entrypoint) == command
    assert s.metadata == {"videoflow_job": s.job, "videoflow_root": "s3://b/cat", "videoflow_name": "demo"}


@pytest.mark.parametrize("name", ["clips"])
def test_a_recipe_that_travelled_has_the_same_fingerprints(name: str) -> None:
    recipe = recipes.load(name)
    arrived = recipes.parse(yaml.safe_load(content(made(recipe))["recipe.yaml"]), origin="x")
    assert [(b.key, b.fingerprint) for b in arrived.build()] == [(b.key, b.fingerprint) for b in recipe.build()]


def test_a_python_recipe_is_evaluated_here(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "from videoflow import Recipe\nrecipe = Recipe(stages={'frames': {'fps': 2 + 2}, 'shots': {'detector': 'hsv'}})"
    )
    text = content(made(recipes.load(str(tmp_path / "r.py"))))["recipe.yaml"].decode()
    assert yaml.safe_load(text)["stages"]["frames"] == {"fps": 4}
    with pytest.raises(RecipeError, match="cannot travel as plain data"):
        made(Recipe(stages={"mine": {"use": "nowhere_module:Stage", "f": object()}}))


def test_equal_content_makes_equal_packages() -> None:
    first, second = made(), made()
    assert first.job != second.job
    assert (first.package, first.digest) == (second.package, second.digest)
    assert made(sources=["s3://b/other"]).digest != first.digest


def test_nothing_that_is_shown_holds_credentials() -> None:
    s = made(sources=[SECRET])
    assert SECRET.encode() in content(s)["recipe.yaml"]
    shown = f"{s.entrypoint} {s.metadata} {s.notes} {s!r}"
    assert "pw" not in shown and "abc" not in shown and "https://host/videos/a.mp4" in shown
    with pytest.raises(InputError, match="was given with credentials") as e:
        submission_of_run(RECIPE, ["s3://b/in"], root="s3://key:pw@b/cat", name="demo")
    assert "pw" not in str(e.value)


@pytest.mark.parametrize(
    ("sources", "root", "what"),
    [
        (["videos"], "s3://b/c", "source videos"),
        (["s3://b/x", "~/videos"], "s3://b/c", "source ~/videos"),
        (["./in/*.mp4"], "/shared/c", "source ./in/"),
        (["s3://b/x"], "catalog", "root catalog"),
    ],
)
def test_paths_of_this_machines_folder_are_refused(sources: list[str], root: str, what: str) -> None:
    with pytest.raises(InputError, match="means nothing to the cluster") as e:
        check_places(sources, root)
    assert str(e.value).startswith(what)


def test_absolute_paths_are_noted() -> None:
    assert check_places(["s3://b/x"], "s3://b/c") == ()
    (note,) = check_places(["/data/in", "file:///data/more"], "/data/cat")
    assert note == "all nodes of the cluster must see the same files at /data/in, /data/more, /data/cat"


def test_parameters_are_checked_before_anything_is_sent() -> None:
    with pytest.raises(RecipeError, match=r"unknown key stages.frames.fpss"):
        made(Recipe(stages={"frames": {"fpss": 4}}))
    with pytest.raises(RecipeError, match="unknown stage 'framez'"):
        made(Recipe(stages={"framez": {}}))


def test_the_interpreter_can_be_named() -> None:
    s = made(python="/opt/my env/bin/python")
    assert shlex.split(s.entrypoint)[:4] == ["/opt/my env/bin/python", "-m", "videoflow.cli.main", "run"]


def test_a_resume_takes_the_code_that_its_stages_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resumed_stage.py").write_text("X = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = Recipe(stages={"mine": {"use": "resumed_stage:X"}})
    s = submission_of_resume(recipe, "20260101T000000-abcdef", root="/shared/cat")
    assert shlex.split(s.entrypoint)[2:] == ["resume", "/shared/cat", "20260101T000000-abcdef"]
    assert sorted(content(s)) == ["launch.sh", "resumed_stage.py"]
    assert s.metadata["videoflow_resumes"] == "20260101T000000-abcdef" and s.metadata["videoflow_job"] == s.job


# -- code of the user's own ------------------------------------------------------------------------------------------


def test_own_modules_travel_and_installed_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "own_pkg"
    (package / "deep" / "__pycache__").mkdir(parents=True)
    for path in ("__init__.py", "deep/stage.py", "deep/weights.bin", ".hidden", "deep/__pycache__/stage.pyc"):
        (package / path).write_text(path)
    (tmp_path / "src" / "own_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    uses = {
        "a": "own_pkg.deep.stage:A",
        "b": "own_module:B",
        "c": "numpy.linalg:C",
        "d": "nowhere_module:D",
        "e": "workers.frames:Frames",
    }
    s = made(Recipe(stages={k: {"use": use} for k, use in uses.items()}))
    own = {"own_pkg/__init__.py", "own_pkg/deep/stage.py", "own_pkg/deep/weights.bin", "own_module.py"}
    assert set(content(s)) == own | {"launch.sh", "recipe.yaml"}
    told = "\n".join(s.notes)
    assert "stage c: numpy is an installed package and does not travel" in told
    assert "stage d: nowhere_module is not on this machine" in told
    assert "goes along: own_module.py, own_pkg (4 files)" in told


def test_with_takes_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("a")
    (tmp_path / "w.bin").write_bytes(b"w")
    recipe = Recipe(stages={"mine": {"use": "lib.a:A"}})
    s = made(recipe, take=[str(tmp_path / "lib"), str(tmp_path / "w.bin")])
    assert set(content(s)) == {"launch.sh", "recipe.yaml", "lib/a.py", "w.bin"}
    assert s.notes == ("goes along: lib, w.bin (2 files)",)
    with pytest.raises(InputError, match="no such file or folder"):
        made(take=[str(tmp_path / "nowhere")])
    (tmp_path / "launch.sh").touch()
    with pytest.raises(InputError, match="the name is taken"):
        made(take=[str(tmp_path / "launch.sh")])


def test_too_much_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as f:
        f.truncate(MAX_PACKAGE_BYTES + (1 << 20))
    with pytest.raises(InputError, match="101 MiB cannot go along, 100 MiB can"):
        made(take=[str(tmp_path / "large")])


# -- the launcher ----------------------------------------------------------------------------------------------------


def launch(path: list[Path], **env: str) -> subprocess.CompletedProcess[str]:
    script = files("videoflow").joinpath(submissions.LAUNCHER)
    command = ["sh", str(script), "run", "a b", "--x"]
    given = {"PATH": os.pathsep.join(map(str, [*path, "/usr/bin", "/bin"])), **env}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def interpreter(path: Path, *, has_videoflow: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {0 if has_videoflow else 1}\necho "$0"; printf "%s|" "$@"\n')
    path.chmod(0o755)
    return path


def test_the_launcher_takes_the_first_interpreter_that_has_videoflow(tmp_path: Path) -> None:
    without = interpreter(tmp_path / "bin" / "python3", has_videoflow=False).parent
    found = interpreter(tmp_path / "bin" / "python", has_videoflow=True)
    said = launch([without]).stdout.splitlines()
    assert said == [str(found), "-m|videoflow.cli.main|run|a b|--x|"]
    named = interpreter(tmp_path / "opt" / "my python", has_videoflow=True)
    assert launch([without], VIDEOFLOW_PYTHON=str(named)).stdout.splitlines()[0] == str(named)
    broken = interpreter(tmp_path / "broken" / "python", has_videoflow=False)
    assert launch([without], VIDEOFLOW_PYTHON=str(broken)).stdout.splitlines()[0] == str(found)


def test_the_launcher_says_what_it_tried(tmp_path: Path) -> None:
    interpreter(tmp_path / "python3", has_videoflow=False)
    interpreter(tmp_path / "python", has_videoflow=False)
    ended = launch([tmp_path], VIDEOFLOW_PYTHON="/nowhere/python")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "(tried /nowhere/python, python3, python)" in ended.stderr and "--python" in ended.stderr


@pytest.mark.parametrize("quoted", [False, True])
def test_the_launcher_finds_rays_own_interpreter(tmp_path: Path, quoted: bool) -> None:
    """Its node process is an ancestor whose command line names it."""
    place = tmp_path / ("of ray" if quoted else "ray")
    own = interpreter(place / "python", has_videoflow=True)
    for name in ("python3", "python"):
        interpreter(tmp_path / "bin" / name, has_videoflow=False)
    worker = f'"{own}" /setup.py --x' if quoted else f"{own} /setup.py --x"
    script = files("videoflow").joinpath(submissions.LAUNCHER)
    code = f"import subprocess; print(subprocess.run(['sh', {str(script)!r}, 'run'], capture_output=True, text=True).stdout)"
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-c", code, f"--python_worker_command={worker}"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines()[0] == str(own)
