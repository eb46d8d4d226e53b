"""A damaged or littered catalog: one clear line and exit code 4, or, where nothing is lost, the same answers as before."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import videoflow
from tests.jobs import run_job
from videoflow.errors import CatalogError, DamagedCatalog, SystemFailure, VideoflowError
from videoflow.persist import told
from videoflow.recipe import Recipe
from videoflow.store.damage import reading
from videoflow.store.reader import rows_of
from videoflow.testing import make_barcode_video

STAGES: dict[str, Any] = {"frames": {}, "shots": {"detector": "hsv"}, "clips": {"by": "windows", "window_seconds": 1}}
YAML = "stages: {frames: {}, shots: {detector: hsv}, clips: {by: windows, window_seconds: 1}}"
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources in ``in``, a recipe, and the catalog ``cat`` with version x@1."""
    base = tmp_path_factory.mktemp("whole")
    (base / "in").mkdir()
    make_barcode_video(base / "in" / "a.mp4", num_frames=60)
    make_barcode_video(base / "in" / "b.mp4", num_frames=75, offset=500)
    (base / "r.yaml").write_text(YAML)
    run_job(Recipe(stages=STAGES), [base / "in"], base / "cat")
    return base


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "cat", tmp_path / "cat"))


def commands(whole: Path, root: Path) -> list[tuple[object, ...]]:
    (job,) = (p.stem for p in (whole / "cat" / "jobs").glob("*.json"))
    version = videoflow.open(whole / "cat").version("x")
    key = version.clips(columns=["clip_key"])["clip_key"][0].as_py()
    of = ("--source", whole / "in", "--root", root, "--name", "x")
    return [
        ("versions", root),
        ("query", root, "x", "SELECT * FROM clips", "--json"),
        ("jobs", root),
        ("status", root, job),
        ("logs", root, job),
        ("quarantine", "list", root),
        ("explain", root, key, "--recipe", whole / "r.yaml"),
        ("plan", whole / "r.yaml", *of),
        ("du", root),
        ("gc", root, "--dry-run", "--grace", "0"),
    ]


def load_all(root: Path) -> None:
    with videoflow.open(root).version("x").loader(batch_size=1, frames=2, epochs=1) as loader:
        for _ in loader:
            pass


def ask_everything(call: Call, whole: Path, root: Path) -> dict[str, int]:
    """Exit codes by command; each failure is one line that begins like ours."""
    codes = {}
    for args in commands(whole, root):
        answer = call(*args)
        codes[str(args[0])] = answer.code
        told = answer.err.strip().splitlines()
        assert answer.code in (0, 2, 4), (args, answer.err)
        assert (answer.code == 0) == (not told), (args, answer.err)
        assert len(told) <= 1 and all(line.startswith("videoflow: ") and ".rs:" not in line for line in told)
    try:
        load_all(root)
        codes["loader"] = 0
    except VideoflowError as e:
        codes["loader"] = e.exit_code
    return codes


def flip(path: Path) -> None:
    """Other bytes in the last tenth, where Lance keeps what it needs to read a file at all."""
    data = bytearray(path.read_bytes())
    for i in range(len(data) - len(data) // 10, len(data)):
        data[i] ^= 0x55
    path.write_bytes(bytes(data))


HOWS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "flipped": flip,
    "{}": lambda p: p.write_text("{}"),
}


@pytest.mark.parametrize("how", ["gone", "flipped"])
@pytest.mark.parametrize(
    "case",
    [
        ("ledger.lance/data/*.lance", {"quarantine", "plan", "explain", "du"}),
        ("sources.lance/data/*.lance", {"quarantine", "plan", "explain"}),
        ("frames/*/*/data/*.lance", {"loader"}),
        ("clips/*/*/data/*.lance", {"explain"}),
        ("versions/x/1/clips.lance/data/*.lance", {"query", "loader"}),
        ("versions/x/1/clips.lance/_versions/*.manifest", {"query", "loader", "du"}),
    ],
)
def test_damaged_tables_are_named(call: Call, whole: Path, copy: Path, case: tuple[str, set[str]], how: str) -> None:
    table, stopped = case
    for path in copy.glob(table):
        HOWS[how](path)
    codes = ask_everything(call, whole, copy)
    assert {name for name, code in codes.items() if code == 4} >= stopped, codes
    assert codes["versions"] == codes["jobs"] == codes["status"] == 0


@pytest.mark.parametrize("how", ["half", "{}"])
@pytest.mark.parametrize(
    "case",
    [
        ("versions/x/1/version.json", {"versions", "query", "du", "loader"}),
        ("catalog.json", {"versions", "query", "jobs", "plan", "loader"}),
        ("jobs/*.json", {"jobs", "status", "gc"}),
        ("*/*/fingerprint.json", set()),
    ],
)
def test_damaged_records_are_named(call: Call, whole: Path, copy: Path, case: tuple[str, set[str]], how: str) -> None:
    name, stopped = case
    for path in copy.glob(name):
        HOWS[how](path)
    codes = ask_everything(call, whole, copy)
    assert {n for n, code in codes.items() if code == 4} >= stopped, codes
    if not stopped:
        assert set(codes.values()) == {0}


def test_a_damaged_version_hides_no_other_and_blocks_no_new_one(call: Call, whole: Path, copy: Path) -> None:
    shutil.copytree(copy / "versions/x", copy / "versions/y")
    (copy / "versions/x/1/version.json").write_text("{}")
    catalog = videoflow.open(copy)
    assert [v.id for v in catalog.versions()] == ["y@1"]
    with pytest.raises(DamagedCatalog, match=r"versions/x/1/version.json is damaged \(its clips is missing\).*remove"):
        catalog.version("x")
    answer = call("versions", copy, "--json")
    assert answer.code == 4 and [r["version"] for r in answer.rows] == ["y@1"]
    assert run_job(Recipe(stages=STAGES), [whole / "in"], copy).version == "x@2"
    assert videoflow.open(copy).version("x").id == "x@2"


def test_a_damaged_staged_record_is_thrown_away(whole: Path, copy: Path) -> None:
    (folder,) = (copy / "frames").iterdir()
    staged = copy / "staging" / "frames" / folder.name
    for text in ("{}", '{"unit": 3, "items": 4}', "half a reco"):
        staged.mkdir(parents=True, exist_ok=True)
        (staged / f"{'0' * 32}.json").write_text(text)
        summary = run_job(Recipe(stages=STAGES), [whole / "in"], copy)
        assert (summary.exit_code, summary.decoded_videos) == (0, 0)
        assert not list(staged.glob("*.json"))


def test_files_of_others_are_ignored(call: Call, whole: Path, copy: Path) -> None:
    folders = [copy, *(p for p in copy.rglob("*") if p.is_dir())]
    for folder in folders:
        (folder / ".ipynb_checkpoints").mkdir()
        (folder / ".ipynb_checkpoints" / "version-checkpoint.json").write_text("{}")
        (folder / ".DS_Store").write_bytes(b"\x00")
        (folder / "007").mkdir()
        (folder / "part-00000 copy.lance").mkdir()
        (folder / "notes\nof 100%?.txt").write_text("note")
        with open(os.fsencode(folder) + b"/bad\xff", "w", encoding="utf-8") as f:
            f.write("x")
    assert set(ask_everything(call, whole, copy).values()) == {0}
    assert [v.id for v in videoflow.open(copy).versions()] == ["x@1"]
    assert call("gc", copy, "--grace", "0").code == 0
    assert run_job(Recipe(stages=STAGES), [whole / "in"], copy).decoded_videos == 0
    load_all(copy)


def test_no_parts_give_no_rows(copy: Path) -> None:
    assert rows_of(videoflow.open(copy).root, [], ["0" * 32]).num_rows == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("LanceError(IO): Generic S3 error: error sending request, /x/y.rs:12:3", SystemFailure),
        ("Generic N/A error: Operation timed out", SystemFailure),
        ("Input/output error (os error 5)", SystemFailure),
        ("Generic N/A error: Not found: a/b.lance, /x/y.rs:12:3", DamagedCatalog),
        ("No such file or directory (os error 2)", DamagedCatalog),
        ("failed to decode Protobuf message", DamagedCatalog),
    ],
)
def test_a_store_that_does_not_answer_is_no_damage(text: str, kind: type[Exception]) -> None:
    with pytest.raises(SystemFailure) as caught, reading("/root", "frames/0/part-00000.lance"):
        raise OSError(text)
    assert type(caught.value) is kind and caught.value.exit_code == 4
    assert isinstance(caught.value, CatalogError) == (kind is DamagedCatalog)
    assert ".rs" not in told(OSError(text))


@pytest.mark.slow
def test_any_damage_to_any_file_ends_in_one_line(call: Call, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    files = sorted(p.relative_to(whole / "cat") for p in (whole / "cat").rglob("*") if p.is_file())
    count = len(files) * 4 if os.environ.get("VIDEOFLOW_LONG") else 4
    for i in range(count):
        root = Path(shutil.copytree(whole / "cat", tmp_path / str(i)))
        path = root / rng.choice(files)
        data = bytearray(path.read_bytes()) or bytearray(b"0")
        for _ in range(6):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(bytes(data))
        ask_everything(call, whole, root)
        shutil.rmtree(root)
