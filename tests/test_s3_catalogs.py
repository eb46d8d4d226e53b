"""Catalogs on S3: a real server process, behind a proxy that lets requests fail, refuses credentials or goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.catalogs import assert_same, facts
from tests.jobs import Quiet, run_job
from tests.s3_server import KEY_ID, SECRET, Server, all_objects, client, faulty_proxy, make_bucket, moto_server, use
from videoflow import persist
from videoflow.dataset.catalog import Catalog
from videoflow.errors import CatalogError, SystemFailure, VideoflowError
from videoflow.recipe import Recipe
from videoflow.store.layout import Root
from videoflow.testing import make_barcode_video
from videoflow.unit import UnitReport

LONG = bool(os.environ.get("VIDEOFLOW_LONG"))
NUM_VIDEOS = 60 if LONG else 4
RECIPE = Recipe(
    stages={
        "frames": {"short_side": 32},
        "shots": {"detector": "hsv"},
        "clips": {"by": "windows", "window_seconds": 1},
        "slow_luma": {"use": "tests.slow_stage:SlowLuma"},
    }
)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """A server with the empty buckets ``catalogs`` and ``films``, and a proxy that passes everything until it is told."""
    with moto_server() as server, faulty_proxy(server, rate=0) as proxy:
        with pytest.MonkeyPatch.context() as m:
            use(server, m)
            make_bucket("catalogs")
            make_bucket("films")
        yield server, proxy


@pytest.fixture
def proxy(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The endpoint in use is the proxy."""
    use(servers[1], monkeypatch)
    yield servers[1]
    servers[1].set_mode("ok")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A place of its own for each test's catalog."""
    return f"s3://catalogs/{tmp_path.name}/cat"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "REQUEST_RETRIES", 1)
    monkeypatch.setattr(persist, "WAIT_SECONDS", 0)


def make_videos(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        make_barcode_video(folder / f"{i:02}.mp4", num_frames=24 + i % 7, offset=i * 100)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 600)
def test_one_request_in_ten_may_fail(
    servers: tuple[Server, Server], root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources and catalog behind the faulty proxy: keys and digests of an undisturbed local run."""
    videos = make_videos(tmp_path / "in", NUM_VIDEOS)
    local = run_job(RECIPE, [videos], tmp_path / "local")
    use(servers[0], monkeypatch)
    for path in sorted(videos.iterdir()):
        client().put_object(Bucket="films", Key=path.name, Body=path.read_bytes())
    with faulty_proxy(servers[0], rate=0.1, seed=3) as faulty:
        use(faulty, monkeypatch)
        run_job(RECIPE, [videos], root)
        assert_same(root, tmp_path / "local")
        again = run_job(RECIPE, ["s3://films"], tmp_path / "other")
        counts = faulty.counts()
    assert (again.done, again.quarantined, again.clips) == (NUM_VIDEOS, 0, local.clips)
    assert facts(tmp_path / "other") == facts(tmp_path / "local")
    kinds = ("500", "503", "reset", "500-after", "503-after", "reset-after")
    assert all(counts.get(kind) for kind in kinds), counts
    assert 0.05 * counts["requests"] < sum(counts[kind] for kind in kinds) < 0.15 * counts["requests"]


# -- what may go wrong with a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["unconditional", "unsupported"])
def test_a_store_without_conditional_puts_is_refused(proxy: Server, root: str, mode: str) -> None:
    proxy.set_mode(mode)
    with pytest.raises(CatalogError, match=f"{root} has no atomic put-if-absent") as caught:
        Catalog.open(root, create=True)
    assert "\n" not in str(caught.value)
    proxy.set_mode("ok")
    assert list(Root.at(root).paths("")) == []
    Catalog.open(root, create=True)
    description = Root.at(root).get_json("catalog.json") or {}
    assert description["store"] == {"put_if_absent": True, "compare_and_swap": True}
    assert not list(Root.at(root).paths("staging"))


class Breaks(Quiet):
    """Progress that changes the proxy's mode when the first unit of a stage has ended."""

    def __init__(self, proxy: Server, mode: str, stage: str) -> None:
        super().__init__()
        self._proxy, self._mode, self._stage = proxy, mode, stage

    def advance(self, stage: str, report: UnitReport) -> None:
        if stage == self._stage:
            self._proxy.set_mode(self._mode)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("denied", r"refuses the credentials in use \(InvalidAccessKeyId\); mend them and run"),
        ("down", r"cannot be reached; see to its endpoint and network and run"),
    ],
)
def test_a_store_that_is_lost_stops_the_job_and_blames_no_video(
    proxy: Server, root: str, tmp_path: Path, mode: str, says: str
) -> None:
    videos = make_videos(tmp_path / "in", 3)
    with pytest.raises(SystemFailure, match=says) as caught:
        run_job(RECIPE, [videos], root, progress=Breaks(proxy, mode, "decode"), workers=1)
    assert "\n" not in str(caught.value) and KEY_ID not in str(caught.value)
    proxy.set_mode("ok")
    assert {row[0] for row in facts(root).values()} == {"done"}
    resumed = run_job(RECIPE, [videos], root)
    assert (resumed.done, resumed.quarantined, resumed.pending) == (3, 0, 0)


@pytest.mark.usefixtures("impatient")
def test_sources_whose_credentials_are_lost_stop_the_job_and_blame_no_video(proxy: Server, tmp_path: Path) -> None:
    videos, root = make_videos(tmp_path / "in", 2), tmp_path / "cat"
    for path in videos.iterdir():
        client().put_object(Bucket="catalogs", Key=f"in/{path.name}", Body=path.read_bytes())

    class BeforeDecoding(Quiet):
        def begin(self, stage: str, total: int, unit: str) -> None:
            proxy.set_mode("denied" if stage == "decode" else "ok")

    with pytest.raises(SystemFailure, match=r"no valid credentials: .*"):
        run_job(RECIPE, ["s3://catalogs/in"], root, progress=BeforeDecoding())
    assert not any(row[0] == "quarantined" for row in facts(root).values())
    with pytest.raises(SystemFailure, match=r"no valid credentials: .*"):
        run_job(RECIPE, ["s3://catalogs/in"], root)
    proxy.set_mode("ok")
    assert run_job(RECIPE, ["s3://catalogs/in"], root).done == 2


@pytest.mark.usefixtures("impatient")
def test_what_is_wrong_is_said_in_one_line(proxy: Server, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(where: str, **environ: str) -> str:
        with monkeypatch.context() as m:
            for name, value in environ.items():
                m.setenv(name, value) if value else m.delenv(name)
            with pytest.raises(VideoflowError) as caught:
                Catalog.open(where, create=True)
        text = str(caught.value)
        assert "\n" not in text and SECRET not in text and KEY_ID not in text and len(text) < 400
        return text

    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert line(root, **nobody).startswith(f"no credentials for {root}: set AWS_ACCESS_KEY_ID")
    assert "The config profile (nobody) could not be found" in line(root, **nobody, AWS_PROFILE="nobody")
    told = line("s3://nowhere/cat")
    assert told.startswith("cannot write s3://nowhere/cat/") and "there is no such bucket; make it and run" in told
    told = line(f"s3://{KEY_ID}:{SECRET}@catalogs/cat?versionId=1")
    assert told.startswith("root s3://catalogs/cat: no credentials and no query in a root")
    assert line("s3:///cat").startswith("root s3:///cat names no bucket")
    assert "cannot be reached" in line(root, AWS_ENDPOINT_URL="http://127.0.0.1:9")


def test_profile_files_say_where_and_who(
    proxy: Server, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in proxy.environ:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(f"[team]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    (tmp_path / "config").write_text(f"[profile team]\nregion = eu-west-1\nendpoint_url = {proxy.url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    catalog = Catalog.open(root, create=True)
    assert catalog.versions() == [] and catalog.known_sources() == {}
    options = catalog.root.lance_options() or {}
    assert (options["aws_endpoint"], options["aws_region"]) == (proxy.url, "eu-west-1")
    assert SECRET not in str(options) and SECRET not in repr(catalog.root)


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_credentials_are_found_nowhere(proxy: Server, root: str, tmp_path: Path) -> None:
    """Not in any object of the catalog, nor in anything that is printed, whether all goes well or not."""
    videos = make_videos(tmp_path / "in", 2)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(RECIPE.model_dump(mode="json")))
    said = b""

    def run(*args: object, code: int) -> None:
        nonlocal said
        command = [sys.executable, "-m", "videoflow.cli.main", *map(str, args)]
        done = subprocess.run(command, capture_output=True, check=False, env=proxy.full_environ(), timeout=500)
        assert done.returncode == code, done.stderr.decode()
        said += done.stdout + done.stderr

    job = ["run", recipe, "--source", videos, "--root", root, "--name", "x", "--engine", "local", "--workers", "1"]
    run(*job, code=0)
    run("jobs", root, "--json", code=0)
    proxy.set_mode("denied")
    run(*job, code=4)
    proxy.set_mode("ok")
    stored = all_objects(proxy, "catalogs")
    assert len(stored) > 50 and len(said) > 500
    for secret in (SECRET.encode(), KEY_ID.encode()):
        assert secret not in said
        assert [key for key, data in stored.items() if secret in data or secret in key.encode()] == []
