"""Garbage: what a killed run leaves is found and removed, and nothing that anybody needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import videoflow
from tests.jobs import run_job
from tests.s3_server import client, make_bucket, moto_server, use
from videoflow.dataset.catalog import Catalog
from videoflow.keys import digest_bytes
from videoflow.recipe import Recipe
from videoflow.store.commit import Committer, UnitRecord, stage_unit, unit_id
from videoflow.store.gc import DATA, MANIFEST, STAGING, UNFINISHED, VERSION, Garbage, find_garbage, remove
from videoflow.store.ledger import ItemResult
from videoflow.store.schemas import FRAMES
from videoflow.store.usage import TABLE, Usage, usage
from videoflow.store.writer import Target, ensure_target, write_rows
from videoflow.testing import make_barcode_video

RECIPE = Recipe(stages={"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}})
FP = "f" * 32
#: A run that dies between writing its second fragment of the frame cache and saying so.
KILLED = """
import os, signal
import workers.write_unit as write_unit
real, calls = write_unit.stage_unit, []

def dies(root, record):
    calls.append(record.target.stage)
    if calls.count("frames") == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(root, record)

write_unit.stage_unit = dies
from videoflow.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gc")
    for i in range(3):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=45, offset=100 * i)
    return folder


@pytest.fixture(scope="module")
def made(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of these videos; tests copy it."""
    root = tmp_path_factory.mktemp("made") / "cat"
    run_job(RECIPE, [videos], root, workers=1)
    return root


@pytest.fixture
def catalog(made: Path, tmp_path: Path) -> Catalog:
    return Catalog.open(shutil.copytree(made, tmp_path / "cat"))


def garbage_of(catalog: Catalog, *, older_than: timedelta = timedelta(0)) -> list[Garbage]:
    """All garbage but the tables' own old versions, of which there always are some."""
    found = find_garbage(catalog.root, catalog.ledger, cutoff=datetime.now(UTC) - older_than)
    return [g for g in found if g.kind != MANIFEST]


def usages(catalog: Catalog) -> list[Usage]:
    return usage(catalog.root, catalog.ledger, now=datetime.now(UTC))


def read_all(root: Path) -> dict[str, int]:
    """Rows of every artifact table and version, each blob read and held against its digest."""
    found = {}
    for part in sorted([*root.glob("*/*/part-*.lance"), *root.glob("versions/*/*/clips.lance")]):
        dataset = lance.dataset(str(part))
        blobs = "data" in dataset.schema.names
        columns = ["offsets", "digest"] if blobs else None
        rows = dataset.to_table(columns=columns, with_row_id=True).to_pylist()
        if blobs:
            ranges = [(r["_rowid"], 0, r["offsets"][-1]) for r in rows]
            read = dataset.read_blob_ranges("data", ranges, selector="ids") if rows else []
            for request, _, data in read:
                assert digest_bytes(bytes(data)) == rows[request]["digest"]
        found[str(part.relative_to(root))] = len(rows)
    return found


def write_big(target: Target, catalog: Catalog, key: str) -> tuple[list[str], ItemResult]:
    """A fragment of the frame cache whose blob is so large that Lance puts it into a sidecar."""
    data = os.urandom(5 << 20)
    row = {"item_key": key, "input_digest": "d", "video_key": key, "stream": 0, "chunk": 0, "n": 1}
    row |= {"width": 1, "height": 1, "pts": [0], "offsets": [0, len(data)], "damage": [], "digest": digest_bytes(data)}
    columns = [lance.blob_array([data]) if f.name == "data" else pa.array([row[f.name]], f.type) for f in FRAMES]

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays(columns, schema=FRAMES)

    fragments = write_rows(catalog.root, target, FRAMES, batches, expected=1)
    return fragments, ItemResult(key, key, "d", "out", 1)


def test_a_sound_catalog_holds_no_garbage(catalog: Catalog) -> None:
    assert garbage_of(catalog) == []
    lines = usages(catalog)
    manifests = sum(g.num_bytes for g in find_garbage(catalog.root, catalog.ledger, cutoff=datetime.now(UTC)))
    assert sum(u.orphan_bytes for u in lines) == manifests > 0  # three commits a table, one counts
    files = [p for p in Path(catalog.root.url).rglob("*") if p.is_file()]
    assert sum(u.num_bytes for u in lines) == sum(p.stat().st_size for p in files)
    tables = {u.path.split("/")[0]: u for u in lines if u.kind == TABLE}
    assert {t: (u.stage, u.rows, u.versions) for t, u in tables.items()} == {
        "videos": ("probe", 3, ("x@1",)),
        "frames": ("frames", 3, ("x@1",)),
        "shots": ("shots", 3, ("x@1",)),
        "clips": ("clips", 6, ("x@1",)),
    }
    assert tables["frames"].fragments == 3 and not any(u.is_reclaimable for u in lines)


def test_a_data_file_and_its_sidecars_go_together_and_staged_ones_stay(catalog: Catalog) -> None:
    root = catalog.root
    target = ensure_target(root, stage="frames", fingerprint=FP, table="frames", schema=FRAMES)
    data = Path(root.uri(target.path), "data")
    write_big(target, catalog, "a" * 32)
    assert {p.suffix for p in data.rglob("*") if p.is_file()} == {".lance", ".blob"}
    fragments, item = write_big(target, catalog, "b" * 32)
    unit = unit_id("frames", FP, [item.item_key])
    record = stage_unit(root, UnitRecord(unit, target, (item,), tuple(fragments), "job"))

    assert garbage_of(catalog, older_than=timedelta(days=7)) == []
    (found,) = garbage_of(catalog)
    assert (found.kind, len(found.objects)) == (DATA, 2) and found.num_bytes > 5 << 20
    (line,) = [u for u in usages(catalog) if FP in u.path]
    assert (line.orphan_bytes, line.rows) == (found.num_bytes, 0)
    remove(root, [found])
    assert len(list(data.iterdir())) == 2  # the staged file and the folder of its sidecars
    assert garbage_of(catalog) == []

    Committer(root, catalog.ledger).recover("frames", FP)
    assert read_all(Path(root.url))[target.path] == 1
    root.put(record.path, record.to_json())  # as if the committer had died before it removed the record
    (stale,) = garbage_of(catalog)
    assert (stale.kind, stale.path) == (STAGING, record.path)
    remove(root, [stale])
    assert not root.has(record.path) and read_all(Path(root.url))[target.path] == 1


def test_an_unfinished_write_is_garbage(catalog: Catalog) -> None:
    (part,) = Path(catalog.root.url, "frames").glob("*/part-00000.lance")
    (part / "data" / "0101").mkdir()
    for name in (".tmpAbCdEf", "0101/.tmpXyZ", "0101/1.blob"):
        (part / "data" / name).write_bytes(b"half")
    found = garbage_of(catalog)
    assert sorted(Path(g.path).name for g in found) == [".tmpAbCdEf", "0101"]
    remove(catalog.root, found)
    assert not (part / "data" / "0101").exists() and garbage_of(catalog) == []


def test_versions_that_were_never_published_go_after_the_grace_time(catalog: Catalog) -> None:
    folder = Path(catalog.root.url, "versions", "x", "2")
    shutil.copytree(folder.parent / "1", folder)
    (folder / "version.json").unlink()
    assert garbage_of(catalog, older_than=timedelta(hours=1)) == []
    (found,) = garbage_of(catalog)
    assert (found.kind, found.path) == (VERSION, "versions/x/2")
    (folder / "version.json").write_text("{}")
    remove(catalog.root, [found])  # published meanwhile
    assert (folder / "clips.lance").exists()
    (folder / "version.json").unlink()
    remove(catalog.root, [found])
    assert not folder.exists() and catalog.version("x@1").num_clips == 6


def test_a_running_job_is_spared_whatever_the_grace_time(catalog: Catalog, cli_gc) -> None:  # type: ignore[no-untyped-def]
    target = ensure_target(catalog.root, stage="frames", fingerprint=FP, table="frames", schema=FRAMES)
    record = {"job": "j", "state": "running", "started": datetime.now(UTC).isoformat(), "host": "elsewhere"}
    record |= {"heartbeat": record["started"], "pid": 1}
    catalog.root.put("jobs/j.json", json.dumps(record).encode())
    write_big(target, catalog, "a" * 32)
    kinds = ("bytes", "data", "manifest", "staging", "version", "unfinished")
    assert cli_gc(catalog, "--grace", "0")[-1] == {"removed": True, **dict.fromkeys(kinds, 0)}
    catalog.root.put("jobs/j.json", json.dumps({**record, "state": "stopped"}).encode())
    assert cli_gc(catalog, "--grace", "0", "--dry-run")[-1]["data"] == 1
    *lines, last = cli_gc(catalog, "--grace", "0")
    assert (last["removed"], last["data"], last["manifest"]) == (True, 1, 4)  # ledger and sources are too young
    assert [line["files"] for line in lines if line["kind"] == "data"] == [2]
    assert cli_gc(catalog, "--grace", "0")[-1]["bytes"] == 0


@pytest.fixture
def cli_gc():  # type: ignore[no-untyped-def]
    def run(catalog: Catalog, *args: str) -> list[dict]:
        command = [sys.executable, "-m", "videoflow.cli.main", "gc", catalog.root.url, "--json", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.timeout(200)
def test_kill_9_leaves_orphans_that_gc_finds_and_nothing_is_lost(
    videos: Path, made: Path, tmp_path: Path, cli_gc
) -> None:  # type: ignore[no-untyped-def]
    root, recipe = tmp_path / "cat", tmp_path / "r.yaml"
    recipe.write_text(json.dumps(RECIPE.model_dump(mode="json")))
    args = ["run", recipe, "--source", videos, "--root", root, "--name", "x", "--engine", "local", "--workers", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, args)], capture_output=True, check=False)
    assert killed.returncode == -9
    catalog = Catalog.open(root)

    assert cli_gc(catalog)[-1]["bytes"] == 0  # seven days of grace
    orphans = garbage_of(catalog)
    assert DATA in {g.kind for g in orphans}
    assert cli_gc(catalog, "--grace", "0")[-1]["data"] == sum(g.kind == DATA for g in orphans) > 0
    assert garbage_of(catalog) == []
    read_all(root)

    summary = run_job(RECIPE, [videos], root, workers=1)
    assert (summary.done, summary.pending) == (3, 0)
    assert read_all(root) == read_all(made)
    assert cli_gc(catalog, "--grace", "0")[-1]["data"] == 0
    assert read_all(root) == read_all(made)
    loader = videoflow.open(str(root)).version("x").loader(batch_size=6, frames=4, fps=4, epochs=1, tail="pad")
    assert sum(int(b["valid"].sum()) for b in loader) == 6


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket on a real server process."""
    with moto_server() as server:
        use(server, monkeypatch)
        make_bucket("garbage")
        yield "s3://garbage/cat"


def test_a_catalog_on_s3_is_swept_the_same_way(bucket: str) -> None:
    catalog = Catalog.open(bucket, create=True)
    target = ensure_target(catalog.root, stage="frames", fingerprint=FP, table="frames", schema=FRAMES)
    write_big(target, catalog, "a" * 32)
    fragments, item = write_big(target, catalog, "b" * 32)
    unit = unit_id("frames", FP, [item.item_key])
    stage_unit(catalog.root, UnitRecord(unit, target, (item,), tuple(fragments), "job"))
    catalog.root.put("versions/x/1/claim", b"nonce")
    later = datetime.now(UTC) + timedelta(seconds=2)  # this store keeps whole seconds
    s3 = client()
    upload = s3.create_multipart_upload(Bucket="garbage", Key="cat/frames/half.lance")
    part = {"Bucket": "garbage", "Key": "cat/frames/half.lance", "UploadId": upload["UploadId"]}
    s3.upload_part(**part, PartNumber=1, Body=b"x" * 1000)
    s3.create_multipart_upload(Bucket="garbage", Key="catalog-of-another/y")
    # This server says of every upload that it began in 2010.
    long_ago = datetime(2010, 1, 1, tzinfo=UTC)
    assert find_garbage(catalog.root, catalog.ledger, cutoff=long_ago) == []
    found = find_garbage(catalog.root, catalog.ledger, cutoff=later)
    assert sorted((g.kind, len(g.objects)) for g in found) == [(DATA, 2), (UNFINISHED, 1), (VERSION, 1)]
    assert {g.path: g.num_bytes for g in found if g.kind == UNFINISHED} == {"frames/half.lance": 1000}
    assert any(u.path == "frames/half.lance (never finished)" and u.num_bytes == 1000 for u in usages(catalog))
    remove(catalog.root, found)
    assert find_garbage(catalog.root, catalog.ledger, cutoff=later) == [] and catalog.version_numbers("x") == []
    assert [u["Key"] for u in s3.list_multipart_uploads(Bucket="garbage")["Uploads"]] == ["catalog-of-another/y"]
    Committer(catalog.root, catalog.ledger).recover("frames", FP)
    (line,) = [u for u in usages(catalog) if u.kind == TABLE]
    assert (line.path, line.rows, line.fragments) == (f"frames/{FP}", 1, 1)
    assert line.orphan_bytes < line.manifest_bytes  # the first version of the table
    assert line.num_bytes > 5 << 20


def test_tables_of_older_fingerprints_can_be_removed_by_hand(catalog: Catalog, videos: Path) -> None:
    root = Path(catalog.root.url)
    for seconds, name in ((0.5, "y"), (0.75, "z")):
        run_job(RECIPE.with_settings([f"clips.window_seconds={seconds}"]), [videos], root, name=name, workers=1)
    assert not any(u.is_reclaimable for u in usages(catalog))
    shutil.rmtree(root / "versions" / "y")
    (old,) = [u for u in usages(catalog) if u.is_reclaimable]
    assert old.stage == "clips" and old.versions == ()
    assert garbage_of(catalog) == []  # gc never removes a whole table
    before = read_all(root)[f"{old.path}/part-00000.lance"]
    shutil.rmtree(root / old.path)
    half = RECIPE.with_settings(["clips.window_seconds=0.5"])
    again = run_job(half, [videos], root, name="y", workers=1)
    assert again.decoded_videos == 0 and again.clips == before
    assert read_all(root)[f"{old.path}/part-00000.lance"] == before
    assert run_job(half, [videos], root, name="y", workers=1).version == again.version
