"""What the package shows to the outside: its names, its version, what its wheel holds, what importing it loads."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import videoflow
from videoflow.find import load_object

REPO = Path(__file__).parent.parent

PUBLIC = ["Catalog", "Loader", "MediaError", "Recipe", "Video", "VideoflowError", "open"]


def test_exported_members_are_exact_and_sorted() -> None:
    assert list(videoflow.__all__) == sorted(videoflow.__all__)
    assert list(videoflow.__all__) == PUBLIC
    for name in videoflow.__all__:
        assert hasattr(videoflow, name)


@pytest.mark.parametrize("group", ["videoflow.stages", "videoflow.engines", "videoflow.pipelines"])
def test_every_entry_point_resolves(group: str) -> None:
    ours = [e for e in entry_points(group=group) if e.dist is not None and e.dist.name == "videoflow"]
    assert ours
    for entry in ours:
        assert load_object(entry.value, what=group) is not None


def direct_dependencies() -> list[str]:
    """Names in pyproject.toml, extras included, our own extras left out."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in lines}  # type: ignore[index]
    return sorted(names - {"videoflow"})


def canonical(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", direct_dependencies())
def test_every_dependency_is_explained_and_pinned(name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", (REPO / "docs" / "dependencies.md").read_text(encoding="utf-8"))
    if name == "nvidia-dali-cuda120":
        return  # the other CUDA major version; only one of the two can be installed
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert canonical(name) in {canonical(line.split("==")[0]) for line in lines if "==" in line}


def test_import_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "nvidia", "workers", "pipelines")
    code = f"import sys, videoflow; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_import_starts_no_thread_and_no_process() -> None:
    code = (
        "import threading, multiprocessing as mp, videoflow;print(threading.active_count(), len(mp.active_children()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["1", "0"]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(REPO)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_holds_the_three_packages(wheel_names: list[str]) -> None:
    tops = {n.split("/")[0] for n in wheel_names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"videoflow", "workers", "pipelines"}
    for package in ("videoflow", "workers", "pipelines"):
        in_tree = {p.relative_to(REPO).as_posix() for p in (REPO / package).rglob("*.py")}
        assert in_tree <= set(wheel_names)
    assert any(n.endswith("licenses/LICENSE") for n in wheel_names)
    assert "videoflow/launch.sh" in wheel_names


def test_wheel_holds_the_canary_clips(wheel_names: list[str]) -> None:
    canaries = [p for folder in REPO.glob("*/canaries") for p in folder.rglob("*") if p.suffix != ".py" and p.is_file()]
    assert canaries, "the canary clips that decoder identity hangs on are not in the tree"
    assert {p.relative_to(REPO).as_posix() for p in canaries} <= set(wheel_names)
