"""Reading by references: the right frames, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import lance
import numpy as np
import pytest
import simplejpeg

from videoflow.errors import BadSample, SystemFailure
from videoflow.loader import reader as reader_module
from videoflow.loader.embeddings import EmbeddingReader
from videoflow.loader.reader import BlobRef, ClipReader, ClipRef
from videoflow.loader.rows import load_rows


@pytest.fixture
def refs(version: Any) -> list[ClipRef]:
    rows = load_rows(version, split=None, where=None, columns=())
    return rows.clip_refs(np.arange(len(rows)))


def test_every_grid_index_gives_its_own_frame(
    version: Any, refs: list[ClipRef], read_picture: Callable[..., Any]
) -> None:
    wanted = [list(range(first, first + count)) for _, first, count in version.clips]
    for position, clip in enumerate(ClipReader(version.tables["frames"]).read(refs, wanted)):
        assert clip.time_base == Fraction(1, 30000)
        for k, payload, seconds in zip(wanted[position], clip.payloads, clip.pts_seconds, strict=True):
            video, frame, expected_seconds = version.expected(position, k)
            assert read_picture(simplejpeg.decode_jpeg(payload)) == (video, frame)
            assert seconds == expected_seconds


def test_padding_repeats_the_last_frame(version: Any, refs: list[ClipRef]) -> None:
    (clip,) = ClipReader(version.tables["frames"]).read(refs[:1], [[3, 4]], num_frames=4)
    assert clip.frame_valid == (True, True, False, False)
    assert clip.pts[1] == clip.pts[2] == clip.pts[3]


def test_a_missing_row_is_named_and_others_still_read(version: Any, refs: list[ClipRef]) -> None:
    gone = ClipRef("f" * 32, (BlobRef(0, 10_000, 0, 10),), refs[0].grid, 64, 128)
    reader = ClipReader(version.tables["frames"])
    with pytest.raises(BadSample, match=r"clip f{32}: its frames row .* row 10000.* is gone"):
        reader.read([refs[0], gone], [[3], [3]])
    assert len(reader.read([refs[0]], [[3]])) == 1


def test_a_range_beyond_the_blob_is_named(version: Any, refs: list[ClipRef]) -> None:
    ref = refs[0].refs[0]
    beyond = ClipRef("e" * 32, (ref._replace(length=10**9),), refs[0].grid, 64, 128)
    with pytest.raises(BadSample, match=r"clip e{32}.* does not hold bytes"):
        ClipReader(version.tables["frames"]).read([beyond], [[3]])


def test_a_grid_index_without_a_frame(version: Any, refs: list[ClipRef]) -> None:
    with pytest.raises(BadSample, match=r"hold none for grid index 0"):
        ClipReader(version.tables["frames"]).read([refs[0]], [[0]])


def test_a_corrupt_record_is_named(make_version: Callable[..., Any]) -> None:
    def flip(video: int, chunk: int, data: bytes, offsets: list[int]) -> bytes:
        if (video, chunk) != (1, 0):
            return data
        at = offsets[4] + 40
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    version = make_version(num_videos=2, clips=[(0, 0, 8), (1, 0, 8)], corrupt=flip)
    refs = load_rows(version, split=None, where=None, columns=()).clip_refs(np.arange(2))
    reader = ClipReader(version.tables["frames"])
    assert len(reader.read(refs[:1], [[0, 1]])) == 1
    with pytest.raises(BadSample, match=f"clip {2:032x}: .*CRC"):
        reader.read(refs, [[0, 1], [0, 1]])


def test_storage_faults_are_tried_again_then_stop(
    version: Any, refs: list[ClipRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "WAIT_SECONDS", 0)
    calls: list[int] = []

    class Flaky:
        def __init__(self, good_from: int) -> None:
            self._dataset = lance.dataset(version.tables["frames"][0])
            self._good_from = good_from

        def read_blob_ranges(self, *args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) < self._good_from:
                raise OSError("connection reset")
            return self._dataset.read_blob_ranges(*args, **options)

        def _take_rows(self, *args: Any, **options: Any) -> Any:
            return self._dataset._take_rows(*args, **options)

    reader = ClipReader(version.tables["frames"])
    reader._parts._open[0] = Flaky(good_from=4)
    assert len(reader.read([refs[0]], [[3]])) == 1
    calls.clear()
    reader._parts._open[0] = Flaky(good_from=100)
    with pytest.raises(SystemFailure, match=r"tried 3 times: connection reset"):
        reader.read([refs[0]], [[3]])


def test_a_table_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, refs: list[ClipRef]) -> None:
    monkeypatch.setattr(reader_module, "WAIT_SECONDS", 0)
    with pytest.raises(SystemFailure, match=r"cannot open"):
        ClipReader([str(tmp_path / "none.lance")] * 2).read(refs[:1], [[3]])


def test_embeddings_are_checked_against_their_clips(version: Any) -> None:
    rows = load_rows(version, split=None, where=None, columns=("embedding",))
    reader = EmbeddingReader(version.tables["embeddings"])
    asked = np.array([7, 2, 7])
    vectors = reader.read(rows.keys(asked), *rows.embedding_refs(asked))
    assert vectors.dtype == np.float32
    assert vectors[:, 0].tolist() == [7, 2, 7]
    parts, ids = rows.embedding_refs(asked)
    with pytest.raises(BadSample, match=r"embedding .* is gone or belongs to another clip"):
        reader.read(rows.keys(asked), parts, ids + 1000)
    with pytest.raises(BadSample, match=f"clip {8:032x}"):
        reader.read(rows.keys(asked), parts, ids + 1)
