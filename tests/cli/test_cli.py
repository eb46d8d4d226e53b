"""The command line as scripts meet it: exit codes, one line of error, JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from videoflow.cli.run import JSON_KEYS, parse_bytes, parse_percent
from videoflow.errors import InputError
from videoflow.testing import make_barcode_video

CHEAP = "stages: {frames: {}, shots: {detector: hsv}, clips: {by: windows, window_seconds: 1}, embed: {dtype: float32}}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe file and a folder with two videos and two files that are none."""
    base = tmp_path_factory.mktemp("cli")
    folder = base / "in"
    folder.mkdir()
    make_barcode_video(folder / "a.mp4", num_frames=60)
    make_barcode_video(folder / "b.mp4", num_frames=75, offset=500)
    (folder / "empty.mp4").touch()
    (folder / "words.txt").write_text("words")
    (base / "r.yaml").write_text(CHEAP)
    return {"recipe": base / "r.yaml", "in": folder, "root": base / "cat"}


def run_args(made: dict[str, Path], *more: object) -> list[object]:
    return [
        "run",
        made["recipe"],
        "--source",
        made["in"],
        "--root",
        made["root"],
        "--name",
        "x",
        "--engine",
        "local",
        *more,
    ]


def test_run_query_search_and_quarantine(call, made: dict[str, Path]) -> None:  # type: ignore[no-untyped-def]
    planned = call(
        "plan", made["recipe"], "--source", made["in"], "--root", made["root"], "--name", "x", "--json"
    ).rows[0]
    assert (planned["videos"], planned["to_decode"], planned["ignored"]) == (3, 3, 1)
    assert planned["estimated_frame_cache_bytes"] > 0 and not made["root"].exists()

    ran = call(*run_args(made, "--json"))
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert tuple(result) == JSON_KEYS
    assert result["videos"] == result["done"] + result["filtered"] + result["quarantined"] + result["pending"] == 3
    assert (result["version"], result["decoded_videos"], result["ignored"], result["clips"]) == ("x@1", 3, 1, 5)

    again = json.loads(call(*run_args(made, "--json")).out.splitlines()[-1])
    assert (again["decoded_videos"], again["version"]) == (0, "x@1")
    planned = call(
        "plan", made["recipe"], "--source", made["in"], "--root", made["root"], "--name", "x", "--json"
    ).rows[0]
    assert planned["to_decode"] == 0
    assert {s["stage"]: (s["cached"], s["to_compute"], s["quarantined"]) for s in planned["stages"]} == {
        "probe": (2, 0, 1),
        "frames": (2, 0, 1),
        "shots": (2, 0, 1),
        "clips": (2, 0, 1),
        "embed": (5, 0, 0),
    }

    assert [r["version"] for r in call("versions", made["root"], "--json").rows] == ["x@1"]
    counted = call(
        "query", made["root"], "x@1", "SELECT uri, count(*) AS n FROM clips GROUP BY uri ORDER BY uri", "--json"
    ).rows
    assert [r["n"] for r in counted] == [2, 3]
    key = call("query", made["root"], "x", "SELECT clip_key FROM clips ORDER BY uri, t0_us", "--json").rows[0][
        "clip_key"
    ]
    found = call("search", made["root"], "x@1", "--clip", key, "-k", 3, "--json").rows
    assert [list(r) for r in found] == [["clip_key", "score", "uri", "t0_us", "t1_us"]] * 3
    assert key not in {r["clip_key"] for r in found}
    assert [r["score"] for r in found] == sorted((r["score"] for r in found), reverse=True)
    (bad,) = call("quarantine", "list", made["root"], "--json").rows
    assert bad == {"uri": str(made["in"] / "empty.mp4"), "class": "empty", "stage": "probe", "message": bad["message"]}
    for args in (
        ["versions", made["root"]],
        ["quarantine", "list", made["root"]],
        ["query", made["root"], "x", "SELECT 1 AS one"],
    ):
        assert call(*args).code == 0

    for query, says in (("SELEC 1", "syntax"), ("SELECT * FROM 'r.yaml'", "r.yaml"), ("INSTALL httpfs", "")):
        wrong = call("query", made["root"], "x", query)
        assert wrong.code == 2 and says in wrong.err
        assert len(wrong.err.strip().splitlines()) == 1
    for args in (
        ["search", made["root"], "x", "--clip", "nope"],
        ["query", made["root"], "y", "SELECT 1"],
        ["query", made["root"], "../x", "SELECT 1"],
    ):
        assert call(*args).code == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({1: "nowhere.yaml"}, "no recipe file"),
        ({1: "clipz"}, "no recipe 'clipz'"),
        ({3: "/nowhere/at/all"}, "does not exist"),
        ({7: "a/b"}, "version name"),
        ({9: "spark"}, "unknown engine"),
    ],
)
def test_wrong_input_is_one_line_and_2(call, made: dict[str, Path], change: dict[int, str], says: str) -> None:  # type: ignore[no-untyped-def]
    args = run_args(made)
    for i, value in change.items():
        args[i] = value
    answer = call(*args)
    assert answer.code == 2 and says in answer.err.splitlines()[-1]
    assert "Traceback" not in answer.err


def test_a_setting_that_makes_no_sense(call, made: dict[str, Path]) -> None:  # type: ignore[no-untyped-def]
    for setting, says in (
        ("clips.max=1", "stages.clips.max"),
        ("frames.fps=0", "stages.frames.fps"),
        ("nothing", "key=value"),
    ):
        answer = call(*run_args(made, "--set", setting))
        assert answer.code == 2 and says in answer.err.strip().splitlines()[-1]


def test_too_many_quarantined_is_3_and_the_version_is_published(call, made: dict[str, Path], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for i in range(3):
        (tmp_path / f"{i}.mp4").write_text(f"no video {i}")
    args = run_args(made, "--json", "--source", tmp_path, "--max-quarantined", "20%")
    args[5] = tmp_path / "cat"
    answer = call(*args)
    result = json.loads(answer.out.splitlines()[-1])
    assert (answer.code, result["quarantined"], result["done"], result["version"]) == (3, 4, 2, "x@1")
    args = run_args(made, "--json", "--source", tmp_path, "--max-quarantined", "100%")
    args[5] = tmp_path / "cat"
    assert call(*args).code == 0


def test_nothing_done_is_3(call, made: dict[str, Path], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "no.mp4").write_text("no video")
    args = run_args(made)
    args[3], args[5] = tmp_path, tmp_path / "cat"
    assert call(*args).code == 3


def test_a_root_in_the_way_is_one_line(call, made: dict[str, Path], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("in the way")
    args = run_args(made)
    args[5] = tmp_path / "file"
    answer = call(*args)
    assert answer.code in (2, 4) and "Traceback" not in answer.err and len(answer.err.strip().splitlines()) == 1


def test_sizes_and_percentages() -> None:
    assert [parse_bytes(t) for t in ("2GB", "1GiB", "512MiB", "10", None)] == [
        2_000_000_000,
        1 << 30,
        512 << 20,
        10,
        None,
    ]
    assert (parse_percent("10%"), parse_percent("5")) == (0.1, 0.05)
    for bad in ("x", "2QB", "-1GB"):
        with pytest.raises(InputError):
            parse_bytes(bad)
    for bad in ("x%", "101%", "-1"):
        with pytest.raises(InputError):
            parse_percent(bad)


def test_help_names_every_command(call) -> None:  # type: ignore[no-untyped-def]
    text = call("--help").out
    for command in ("plan", "run", "versions", "query", "search", "quarantine"):
        assert re.search(rf"\b{command}\b", text)
