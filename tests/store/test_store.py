"""Roots, parts, frame records."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoflow.dataset.catalog import Catalog
from videoflow.errors import BadSample, CatalogError, SystemFailure
from videoflow.store import writer
from videoflow.store.blobs import HEADER, iter_records, pack_records
from videoflow.store.layout import Root
from videoflow.store.schemas import CLIPS

FRAMES = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=64)), max_size=8)


@given(FRAMES)
def test_records_survive_and_any_run_of_whole_records_explains_itself(frames: list[tuple[int, bytes]]) -> None:
    blob, offsets = pack_records(frames)
    assert [(r.pts, bytes(r.payload)) for r in iter_records(blob)] == frames
    for i in range(len(frames)):
        part = blob[offsets[i] : offsets[-1]]
        assert [(r.pts, bytes(r.payload)) for r in iter_records(part)] == frames[i:]


def test_every_flipped_byte_is_seen() -> None:
    blob, _ = pack_records([(7, b"abcdef")])
    for i in range(len(blob)):
        broken = bytearray(blob)
        broken[i] ^= 0x10
        with pytest.raises(BadSample):
            list(iter_records(bytes(broken)))


def test_a_cut_range_is_an_error() -> None:
    blob, _ = pack_records([(7, b"abcdef")])
    for n in (1, HEADER.size, len(blob) - 1):
        with pytest.raises(BadSample, match="cut off"):
            list(iter_records(blob[:n]))


def test_put_new_is_put_if_absent(tmp_path: Path) -> None:
    root = Root.at(tmp_path)
    assert root.put_new("a/é 動.json", b"1") and not root.put_new("a/é 動.json", b"2")
    assert root.get("a/é 動.json") == b"1"
    assert list(root.paths("a")) == ["a/é 動.json"] and root.list_dirs("nowhere") == []
    root.delete("a/é 動.json")
    root.delete("a/é 動.json")
    assert root.get("a/é 動.json") is None


def test_a_root_that_cannot_be_written_is_a_system_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((SystemFailure, CatalogError)):
        Catalog.open(tmp_path / "file", create=True)


def test_a_catalog_is_not_made_by_looking(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no catalog"):
        Catalog.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_newer_formats_are_refused(tmp_path: Path) -> None:
    root = Catalog.open(tmp_path, create=True).root
    root.put("catalog.json", b'{"format": 99}')
    with pytest.raises(CatalogError, match="newer"):
        Catalog.open(tmp_path)


def test_a_full_table_closes_and_its_next_part_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Catalog.open(tmp_path, create=True).root
    first = writer.ensure_target(root, stage="clips", fingerprint="0" * 32, table="clips", schema=CLIPS)
    monkeypatch.setattr(writer, "MAX_FRAGMENTS", 0)
    second = writer.ensure_target(root, stage="clips", fingerprint="0" * 32, table="clips", schema=CLIPS)
    assert (first.part, second.part) == (0, 1)
    assert writer.parts_of(root, "clips", "0" * 32) == [0, 1]
