"""Where the tests find the hard files, and small inputs made here."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.http_server import Server
from tests.jobs import run_job
from videoflow import recipe as recipes
from videoflow.dataset.catalog import Catalog

# A property is about values: how long an example takes on a busy machine says nothing.
settings.register_profile("videoflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("videoflow")

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("VIDEOFLOW_CORPUS") or ROOT.parent / "shared" / "videos")


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of the hard files; missing it is a failure in CI and a skip elsewhere."""
    if not (CORPUS / "INDEX.tsv").is_file():
        if os.environ.get("CI"):
            pytest.fail(f"no hard files at {CORPUS}; set VIDEOFLOW_CORPUS")
        pytest.skip(f"no hard files at {CORPUS}; set VIDEOFLOW_CORPUS")
    return CORPUS


def read_tsv(name: str) -> list[dict[str, str]]:
    """Rows of one of the corpus's tables; empty where there is no corpus (tests then skip by the fixture)."""
    path = CORPUS / name
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as f:
        return list(
            csv.DictReader((line for line in f if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE)
        )


@pytest.fixture(scope="session")
def catalog_of_hard_files(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """All hard files through recipe `clips` on the local engine: version `hard`, and `hard_short` with min_seconds
    0.1.
    """
    root = tmp_path_factory.mktemp("hard")
    recipe = recipes.load("clips")
    summary = run_job(recipe, [corpus], root, name="hard")
    (root / "summary.json").write_text(json.dumps(summary.to_dict(), default=str))
    run_job(recipe.with_settings(["clips.min_seconds=0.1"]), [corpus], root, name="hard_short")
    return Catalog.open(root)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """An HTTP server that answers as it is told, and an environment without Ray's tokens."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a costly fixture, or start Ray, run in one worker each."""
    for item in items:
        if "catalog_of_hard_files" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("hard"))
        elif "ray" in item.name:
            item.add_marker(pytest.mark.xdist_group("ray"))
