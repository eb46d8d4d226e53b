"""What is a video, what is ignored, what is named."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import tempfile
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoflow.dataset.catalog import Catalog
from videoflow.errors import SourceError, SystemFailure
from videoflow.manifest import read_manifest
from videoflow.sources import printable, scan
from videoflow.testing import make_barcode_video


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_barcode_video(tmp_path_factory.mktemp("v") / "a.mp4", num_frames=10)


def names(*sources: object) -> list[str]:
    return [Path(f.uri).name for f in scan([str(s) for s in sources]).files]


def test_folders_recurse_and_sidecars_are_ignored(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    data = clip.read_bytes()
    for name in ("b.mp4", "deep/c.MKV", "deep/er/no_extension", "deep/odd.xyz"):
        (tmp_path / name).write_bytes(data)
    for name in ("b.srt", "deep/notes.txt", "deep/c.json", "script.ts", "unknown.xyz2", ".hidden.mp4"):
        (tmp_path / name).write_text("const x: number = 1;")
    found = scan([str(tmp_path)])
    assert sorted(Path(f.uri).name for f in found.files) == ["b.mp4", "c.MKV", "no_extension", "odd.xyz"]
    assert len(found.ignored) == 5


def test_odd_names_come_through(tmp_path: Path, clip: Path) -> None:
    odd = [
        "with space.mp4",
        "动画 é.mp4",
        "a[1].mp4",
        "x?y*.mp4",
        "new\nline.mp4",
        "-rf.mp4",
        "a:b.mp4",
        "%41.mp4",
        "#hash.mp4",
    ]
    for name in odd:
        (tmp_path / name).write_bytes(clip.read_bytes())
    raw = os.fsencode(str(tmp_path)) + b"/bad\xff.mp4"
    with open(raw, "wb") as f:
        f.write(clip.read_bytes())
    found = scan([str(tmp_path)])
    assert len(found.files) == len(odd) + 1
    assert any(f.uri.endswith("bad\\xff.mp4") for f in found.files)
    for f in found.files:
        f.uri.encode("utf-8")  # fit for tables
        assert Path(f.path).exists() or os.path.exists(f.path)
    assert names(tmp_path / "a[1].mp4") == ["a[1].mp4"]  # an existing name is no pattern


def test_globs_links_and_repeats(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    (tmp_path / "b.mov").write_bytes(clip.read_bytes())
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names(tmp_path / "*.mp4") == ["a.mp4"]
    assert names(tmp_path, tmp_path / "a.mp4", tmp_path) == ["a.mp4", "b.mov"]
    with pytest.raises(SourceError, match="no file matches"):
        scan([str(tmp_path / "*.webm")])
    with pytest.raises(SourceError, match="does not exist"):
        scan([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no files"):
        scan([str(tmp_path / "empty")])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_manifests_bring_metadata_and_intervals(tmp_path: Path, clip: Path, kind: str) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    path = tmp_path / f"m.{kind}"
    if kind == "csv":
        path.write_text("uri,start,end,caption\na.mp4,0.1,0.2,hello\na.mp4,0.2,0.3,hello\ngone.mp4,,,lost\n")
    elif kind == "jsonl":
        rows = [{"uri": "a.mp4", "start": a, "end": b, "caption": "hello"} for a, b in ((0.1, 0.2), (0.2, 0.3))]
        path.write_text("\n".join(json.dumps(r) for r in [*rows, {"uri": "gone.mp4", "caption": "lost"}]))
    else:
        columns = {
            "uri": ["a.mp4", "a.mp4", "gone.mp4"],
            "start": [0.1, 0.2, None],
            "end": [0.2, 0.3, None],
            "caption": ["hello", "hello", "lost"],
        }
        pyarrow.parquet.write_table(pa.table(columns), path)
    a, gone = scan([str(path)]).files
    assert (a.metadata, a.interval_metadata) == ({}, ({"caption": "hello"},) * 2)
    assert a.intervals == ((Fraction("0.1"), Fraction("0.2")), (Fraction("0.2"), Fraction("0.3")))
    assert gone.problem and gone.metadata == {"caption": "lost"}


def test_rows_of_one_file_keep_what_each_says(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("uri,start,end,caption,lang\na.mp4,0.1,0.3,a cat,en\na.mp4,0.2,0.4,a dog,\na.mp4,,,,de\n")
    two.write_text("uri,start,end,caption,score\na.mp4,0.2,0.40,a dog,7\na.mp4,0.3,0.5,a bird,\n")
    (a,) = scan([str(one), str(two)]).files
    assert a.metadata == {"lang": "de"}
    assert [(float(s), float(e)) for s, e in a.intervals] == [(0.1, 0.3), (0.2, 0.4), (0.3, 0.5)]
    assert a.interval_metadata == (
        {"caption": "a cat", "lang": "en"},
        {"caption": "a dog", "score": 7},
        {"caption": "a bird"},
    )


def test_long_csv_fields_are_read_and_too_long_ones_are_named(tmp_path: Path) -> None:
    before, path, long = csv.field_size_limit(), tmp_path / "m.csv", "word " * 40_000
    path.write_text(f'uri,note,caption\na.mp4,"two\nlines",x\nb.mp4,y,{long}\n')
    assert [row.metadata["caption"] for row in read_manifest(str(path))] == ["x", long]
    path.write_text('uri,note,caption\na.mp4,"two\nlines",x\nb.mp4,y,"' + "word " * (4 << 20) + "\n")
    with pytest.raises(
        SourceError, match=r"m\.csv line 4: column caption is longer than 16 MiB; if no quote is left open"
    ):
        list(read_manifest(str(path)))
    path.write_text('uri,note\na.mp4,"x"y\n')
    with pytest.raises(SourceError, match=r"m\.csv line 2: .*expected after"):
        list(read_manifest(str(path)))
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            "a.mp4,,,x\na.mp4,,,y\n",
            r"a\.mp4: rows give caption .*'x' \(manifest .*line 2, row 1\) and 'y' \(.*line 3, row 2",
        ),
        ("a.mp4,1,2,x\na.mp4,1.0,2,y\n", r"a\.mp4 from 1 to 2 s: rows give caption .*line 2, row 1.*line 3, row 2"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path: Path, clip: Path, rows: str, says: str) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    (tmp_path / "m.csv").write_text(f"uri,start,end,caption\n{rows}")
    with pytest.raises(SourceError, match=says):
        scan([str(tmp_path / "m.csv")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("path\na.mp4\n", "no column uri"),
        ("uri,start\na.mp4,1\n", "without its counterpart"),
        ("uri,start,end\na.mp4,2,1\n", "row 1: start 2 is not before end 1"),
        ("uri,start,end\na.mp4,0,1\na.mp4,x,1\n", "row 2"),
        ("uri\n\n", "no video|holds no files"),
    ],
)
def test_manifests_that_make_no_sense_are_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(SourceError, match=says):
        scan([str(tmp_path / "m.csv")])


def metadata_of(path: Path, text: str | bytes) -> list[dict]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return [row.metadata for row in read_manifest(str(path))]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["7", "-12", "0"], [7, -12, 0]),
        (["9007199254740993", "1"], [9007199254740993, 1]),
        (["9223372036854775807", "1"], [9223372036854775807, 1]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
        (["0.5", "2"], [0.5, 2.0]),
        (["9007199254740993", "0.5"], ["9007199254740993", "0.5"]),
        (["007", "1"], ["007", "1"]),
        (["+1", "1"], ["+1", "1"]),
        (["1.50", "2.5"], ["1.50", "2.5"]),
        (["1e3", "1"], ["1e3", "1"]),
        (["NA", "1"], ["NA", "1"]),
        (["nan", "inf"], ["nan", "inf"]),
        (["true", "false"], [True, False]),
        (["True", "false"], ["True", "false"]),
        (["2024-01-02", "2024-01-03"], ["2024-01-02", "2024-01-03"]),
        ([" 1", "2"], [" 1", "2"]),
        (["-0", "1"], ["-0", "1"]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_column_of_text_is_numbers_only_if_nothing_is_lost(
    tmp_path: Path, cells: list[str], expected: list, kind: str
) -> None:
    comma = "," if kind == "csv" else "\t"
    text = f"uri{comma}x\n" + "".join(f"a.mp4{comma}{c}\n" for c in cells)
    found = [m["x"] for m in metadata_of(tmp_path / f"m.{kind}", text)]
    assert found == expected and [type(v) for v in found] == [type(v) for v in expected]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_any_text_of_a_csv_comes_back_letter_by_letter(cells: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.csv")
        with path.open("w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f)
            writer.writerows([["uri", "x"], *(["a.mp4", c] for c in cells)])
        if any("\0" in c for c in cells):
            return
        found = [row.metadata.get("x", "") for row in read_manifest(str(path))]
    assert [str(v).lower() if isinstance(v, bool) else str(v) for v in found] == cells


def test_jsonl_and_parquet_keep_their_types(tmp_path: Path) -> None:
    big = 2**63 + 5
    rows = [{"uri": "a.mp4", "n": 9007199254740993, "f": 0.1, "big": big, "l": [1.5], "b": True, "x": None}]
    assert metadata_of(tmp_path / "m.jsonl", "\ufeff\n" + json.dumps(rows[0]) + "\r\n\n") == [
        {"n": 9007199254740993, "f": 0.1, "big": big, "l": [1.5], "b": True}
    ]
    assert metadata_of(tmp_path / "n.jsonl", '{"uri": "a.mp4", "f": NaN, "g": 1}\n') == [{"g": 1}]
    path = tmp_path / "m.parquet"
    pyarrow.parquet.write_table(pa.table({"uri": ["a.mp4"], "f": [float("nan")], "n": [2**62 + 1]}), path)
    assert [row.metadata for row in read_manifest(str(path))] == [{"n": 2**62 + 1}]
    (exact,) = read_manifest(str(_write(tmp_path / "t.jsonl", '{"uri":"a","start":0.12345678901234567890,"end":1}')))
    assert exact.interval == (Fraction("0.12345678901234567890"), Fraction(1))


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("m.jsonl", '{"uri": "a"}\n\n{"uri": ', "line 3: no JSON"),
        ("m.jsonl", '{"uri": "a"}\n[1]', "line 2: a row is an object"),
        ("m.jsonl", '{"uri": "a"}\n{"uri": 7}', "line 2: uri is 7"),
        ("m.jsonl", '{"uri": "a", "s": Infinity}', "line 1: s is inf; numbers must be finite"),
        ("m.jsonl", '{"uri": "a", "s": "\\ud800"}', "line 1: s holds half a character"),
        ("m.jsonl", '{"uri": "a", "start": 2, "end": 1}', "line 1: start 2 is not before end 1"),
        ("m.jsonl", '{"uri": "a", "start": NaN, "end": 1}', "line 1: start and end must be seconds"),
        ("m.csv", 'uri,x\n"a\nb",1\nc,1,2\n', "line 4, row 2: 3 values, but the header names 2 columns"),
        ("m.csv", "uri,start,end\n\na,2,1\n", "line 3, row 1: start 2 is not before end 1"),
        ("m.csv", "uri,x\na,\xff\n", "line 2: the text is not UTF-8"),
        ("m.csv", 'uri,x\na,"b\n', "m.csv line 2: unexpected end of data"),
        ("m.csv", "", "no column uri; its columns are none"),
        ("m.parquet", "no parquet", "cannot read manifest"),
    ],
)
def test_mistakes_of_a_manifest_are_named_by_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(SourceError, match=re.escape(says)):
        metadata_of(tmp_path / name, text.encode("latin-1"))


def test_credentials_and_queries_are_not_shown() -> None:
    assert printable("https://user:secret@host/a.mp4?token=x#y") == "https://host/a.mp4"
    assert printable("s3://bucket/a b.mp4") == "s3://bucket/a b.mp4"


def test_pipes_and_links_to_themselves_stop_nothing(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    found = {Path(f.uri).name: f.problem for f in scan([str(tmp_path), str(tmp_path / "*")]).files}
    assert found["a.mp4"] is None
    assert found["pipe.mp4"] and found["loop.mp4"]


def test_what_is_no_file_is_counted_with_its_kind(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    (tmp_path / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(tmp_path)  # the name of a socket may only be short
        try:
            s.bind("sock")
        finally:
            os.chdir(here)
        for sources in ([tmp_path], [tmp_path / "*"]):
            found = scan([str(s) for s in sources])
            assert found.ignored_why == {"device": 1, "no video": 1, "pipe": 1, "socket": 1}
            assert len(found.ignored) == 4 and [Path(f.uri).name for f in found.files] == ["a.mp4"]
        with pytest.raises(SourceError, match="pipe is a pipe, not a folder"):
            scan([str(tmp_path / "pipe")])


def test_a_folder_that_cannot_be_listed_is_one_unreadable_source(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = {f.uri: f.problem for f in scan([str(tmp_path)]).files}
    assert found == {
        str(tmp_path / "a.mp4"): None,
        f"{tmp_path}/closed/": "cannot list the folder: Permission denied",
    }
    with pytest.raises(SystemFailure, match="cannot list"):
        scan([str(tmp_path / "closed")])


def test_a_catalog_among_the_sources_is_passed_over(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    for root in (tmp_path / "inside", tmp_path):  # the second is the source folder itself
        catalog = Catalog.open(root, create=True)
        catalog.root.put(f"frames/{'0' * 32}/fingerprint.json", b"{}")
        catalog.root.put("jobs/j.json", b"{}")
        found = scan([str(tmp_path)])
        assert ([Path(f.uri).name for f in found.files], found.ignored) == (["a.mp4"], ())
    (tmp_path / "frames2").mkdir()
    (tmp_path / "frames2" / "b.mp4").write_bytes(clip.read_bytes())
    assert names(tmp_path) == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize("column", ["a.b", "_rowid", ""])
def test_columns_that_no_table_can_have_are_named_before_any_work(tmp_path: Path, column: str) -> None:
    (tmp_path / "m.csv").write_text(f"uri,{column}\na.mp4,1\n")
    with pytest.raises(SourceError, match="column"):
        scan([str(tmp_path / "m.csv")])
