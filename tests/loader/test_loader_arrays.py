"""Arrays in batches: each clip its own, padded with a mask, without a copy where nothing is to pad, on any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from videoflow.errors import BadSample, LoaderError
from videoflow.loader import Loader
from videoflow.loader.attached import ArrayColumn, ArrayRefs
from videoflow.store import schemas
from videoflow.store.blobs import proved

torch = pytest.importorskip("torch", reason="needs videoflow[torch]")

HEAD = {"item_key": "0" * 32, "input_digest": "0" * 32, "stream": 0}
#: What token rows hold beside their array; nothing here reads it.
REST = {
    "kind": "ids", "tokenizer": "t", "tokenizer_digest": "0" * 32, "num_frames": 1, "height": 8, "width": 8, "first_us": 0,
    "last_us": 0, "psnr": None, "ssim": None,
}  # fmt: skip


def ragged(n: int) -> np.ndarray:
    """Ids of clip n: (1 + n % 3, 2, 2 + n % 2), each the clip's number and its place."""
    shape = (1 + n % 3, 2, 2 + n % 2)
    return (n * 100 + np.arange(np.prod(shape))).reshape(shape).astype(np.uint16)


def even(n: int) -> np.ndarray:
    return (n + np.arange(24, dtype=np.float16) / 32).reshape(2, 3, 2, 2)


def write_tokens(uri: str, arrays: Sequence[np.ndarray], *, dtype: str | None = None) -> list[int]:
    """Row ids by clip; rows lie in another order than the clips."""
    order = np.random.default_rng(0).permutation(len(arrays))
    rows = [
        {**HEAD, **REST, "video_key": "0" * 32, "clip_key": f"{n + 1:032x}", "grid": [1, 1, 1], "dtype": dtype or arrays[n].dtype.name,
         "shape": list(arrays[n].shape), **proved(arrays[n].tobytes())}
        for n in order
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=schemas.TOKENS)
    dataset = lance.write_dataset(table, uri, data_storage_version="2.2", enable_stable_row_ids=True)
    ids = dataset.scanner(columns=[], with_row_id=True).to_table()["_rowid"].to_pylist()
    found = [0] * len(arrays)
    for n, row_id in zip(order, ids, strict=True):
        found[n] = row_id
    return found


def with_column(version: Any, root: Path, name: str, arrays: Sequence[np.ndarray], **options: Any) -> Any:
    """The version with one more column of arrays; references to the second half lead to a second part."""
    half = len(arrays) // 2
    uris, refs = [], []
    for part, some in enumerate((range(half), range(half, len(arrays)))):
        uris.append(str(root / f"{name}/part-{part:05d}.lance"))
        ids = write_tokens(uris[-1], arrays, **options)
        refs += [{"part": part, "row_id": ids[n], "shape": list(arrays[n].shape)} for n in some]
    table = lance.dataset(version.clips_uri).to_table()
    table = table.append_column(name, pa.array(refs, schemas.ARRAY_REF))
    uri = str(root / f"clips-{name}.lance")
    lance.write_dataset(table, uri, data_storage_version="2.2")
    return replace(version, clips_uri=uri, tables={**version.tables, name: uris})


@pytest.fixture(scope="module")
def tokened(version: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, count = tmp_path_factory.mktemp("arrays"), len(version.clips)
    made = with_column(version, root, "tokens", [ragged(n) for n in range(count)])
    return with_column(made, root, "latents", [even(n) for n in range(count)])


def batches(version: Any, **options: Any) -> list[dict[str, Any]]:
    with Loader(version, epochs=1, **{"batch_size": 4, "video": False, "columns": ["tokens"], **options}) as loader:
        return list(loader)


def check_ragged(batch: dict[str, Any]) -> None:
    shapes = [ragged(int(p)).shape for p in batch["position"] if p >= 0]
    assert tuple(batch["tokens"].shape[1:]) >= tuple(max(s[i] for s in shapes) for i in range(3))
    for slot, position in enumerate(batch["position"].tolist()):
        own = ragged(position) if position >= 0 else np.zeros((0, 0, 0), np.uint16)
        t, h, w = own.shape
        assert np.array_equal(batch["tokens"][slot, :t, :h, :w].numpy(), own)
        mask = batch["tokens_valid"][slot]
        assert mask[:t, :h, :w].all() and int(mask.sum()) == t * h * w
        assert int(batch["tokens"][slot][~mask].abs().sum()) == 0


def test_each_clip_has_its_own_ids_and_a_mask(tokened: Any) -> None:
    seen = []
    for batch in batches(tokened, tail="pad"):
        assert batch["tokens"].dtype == torch.int32 and batch["tokens_valid"].dtype == torch.bool
        assert not {"video", "pts_seconds", "frame_valid"} & batch.keys()
        check_ragged(batch)
        seen += [p for p in batch["position"].tolist() if p >= 0]
    assert sorted(seen) == list(range(len(tokened.clips)))


def test_pictures_and_arrays_of_the_same_clips(tokened: Any) -> None:
    with_video = batches(tokened, video=True, frames=4, fps=8, columns=["tokens", "latents", "embedding", "motion"])
    without = batches(tokened, columns=["tokens", "latents", "embedding", "motion"])
    for a, b in zip(with_video, without, strict=True):
        assert a["video"].shape == (4, 4, 3, 64, 128)
        assert a["clip_key"] == b["clip_key"]  # the same order
        for name in ("tokens", "latents", "embedding", "motion"):
            assert torch.equal(a[name], b[name])


def test_equal_shapes_come_without_a_copy(tokened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from videoflow.loader import buffers

    def take(self: Any, shape: Any) -> Any:
        raise AssertionError("a buffer to copy into was taken")

    monkeypatch.setattr(buffers.BufferPool, "take", take)
    count = 0
    where = "position < 11"  # one part: one piece of memory
    for batch in batches(tokened, columns=["latents"], filter=where):
        assert batch["latents"].dtype == torch.float16
        for slot, position in enumerate(batch["position"].tolist()):
            assert np.array_equal(batch["latents"][slot].numpy(), even(position))
            count += 1
        assert batch["latents_valid"].shape == (4, 3, 2, 2) and batch["latents_valid"].all()
        batch["latents"] += 1  # a trainer's own memory
    assert count == 8
    with pytest.raises(AssertionError, match="copy"):
        batches(tokened, columns=["tokens"])


def test_ranks_share_a_shape(tokened: Any) -> None:
    whole = batches(tokened, batch_size=6, seed=3)
    ranks = [batches(tokened, batch_size=6, seed=3, rank=r, world_size=3) for r in range(3)]
    for one, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        assert {tuple(p["tokens"].shape[1:]) for p in parts} == {tuple(one["tokens"].shape[1:])}
        assert torch.equal(torch.cat([p["tokens"] for p in parts]), one["tokens"])


def test_bfloat16_and_text_masks(version: Any, tmp_path: Path) -> None:
    values = [torch.full((1 + n % 4, 3), n + 0.5).to(torch.bfloat16) for n in range(len(version.clips))]
    bits = [v.view(torch.int16).numpy() for v in values]
    made = with_column(version, tmp_path, "text_embedding", bits, dtype="bfloat16")
    for batch in batches(made, columns=["text_embedding"]):
        assert batch["text_embedding"].dtype == torch.bfloat16
        for slot, position in enumerate(batch["position"].tolist()):
            length = 1 + position % 4
            assert torch.equal(batch["text_embedding"][slot, :length], values[position])
            assert batch["text_mask"][slot].tolist() == [i < length for i in range(batch["text_mask"].shape[1])]


def test_clips_without_an_array_are_named_and_can_be_left_out(tokened: Any, tmp_path: Path) -> None:
    table = lance.dataset(tokened.clips_uri).to_table()
    refs = table["tokens"].to_pylist()
    refs[3] = refs[7] = None
    at = table.column_names.index("tokens")
    table = table.set_column(at, "tokens", pa.array(refs, schemas.ARRAY_REF))
    lance.write_dataset(table, str(tmp_path / "clips.lance"), data_storage_version="2.2")
    lacking = replace(tokened, clips_uri=str(tmp_path / "clips.lance"))
    with pytest.raises(
        LoaderError, match=r"2 of 23 clips have no tokens; leave them out with filter='tokens IS NOT NULL'"
    ):
        Loader(lacking, batch_size=4, video=False, columns=["tokens"])
    found = batches(lacking, filter="tokens IS NOT NULL", tail="pad")
    assert sum(int(b["valid"].sum()) for b in found) == 21


@pytest.mark.parametrize("what", ["gone", "another's", "another shape"])
def test_rows_that_are_not_the_clips_own(version: Any, tmp_path: Path, what: str) -> None:
    made = with_column(version, tmp_path, "tokens", [ragged(n) for n in range(len(version.clips))])
    dataset = lance.dataset(made.tables["tokens"][0])
    key = f"{5:032x}"
    if what == "gone":
        dataset.delete(f"clip_key = '{key}'")
    elif what == "another's":
        dataset.update({"clip_key": f"'{'e' * 32}'"}, where=f"clip_key = '{key}'")
    else:
        table = dataset.to_table()
        shapes = [
            [9, 9, 9] if k == key else s
            for k, s in zip(table["clip_key"].to_pylist(), table["shape"].to_pylist(), strict=True)
        ]
        at = table.column_names.index("shape")
        table = table.set_column(at, table.schema.field("shape"), pa.array(shapes, pa.list_(pa.int32())))
        lance.write_dataset(
            table, made.tables["tokens"][0], mode="overwrite", data_storage_version="2.2", enable_stable_row_ids=True
        )
    with pytest.raises(BadSample, match="gone or is another's"):
        batches(made, shuffle=False)


def test_a_row_that_is_too_short(version: Any, tmp_path: Path) -> None:
    column = pa.array([{"part": 0, "row_id": 0, "shape": [2, 2, 2]}], schemas.ARRAY_REF)
    uri = str(tmp_path / "t.lance")
    write_tokens(uri, [np.zeros((2, 2, 2), np.uint8)[:1]])
    table = lance.dataset(uri).to_table()
    table = table.set_column(
        table.column_names.index("shape"), table.schema.field("shape"), pa.array([[2, 2, 2]], pa.list_(pa.int32()))
    )
    lance.write_dataset(table, uri, mode="overwrite", data_storage_version="2.2", enable_stable_row_ids=True)
    row_id = lance.dataset(uri).scanner(columns=[], with_row_id=True).to_table()["_rowid"][0].as_py()
    column = pa.array([{"part": 0, "row_id": row_id, "shape": [2, 2, 2]}], schemas.ARRAY_REF)
    reader = ArrayColumn(ArrayRefs("tokens", column, {"clip_key": pa.array([f"{1:032x}"])}), [uri])
    with pytest.raises(BadSample, match=r"4 bytes for an array of shape \(2, 2, 2\), uint8"):
        reader.tensors(reader.read(np.array([0])), (2, 2, 2), 1)


def test_damaged_bytes_are_found(version: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(version.clips)
    monkeypatch.setitem(globals(), "proved", lambda data: {"data": data, "crc": 1})
    bad = with_column(version, tmp_path, "tokens", [even(n) for n in range(count)])
    with pytest.raises(BadSample, match=r"clip [0-9a-f]{32}: its tokens fail their CRC"):
        batches(bad)


def test_arrays_of_another_number_of_axes() -> None:
    refs = [{"part": 0, "row_id": i, "shape": shape} for i, shape in enumerate(([2, 2, 2], [2, 2, 2, 2]))]
    with pytest.raises(LoaderError, match=r"different numbers of axes, \[3, 4\]"):
        ArrayRefs("tokens", pa.array(refs, schemas.ARRAY_REF), {})


def test_a_loader_without_pictures_resumes_and_refuses_their_options(tokened: Any) -> None:
    whole = batches(tokened, seed=5)
    with Loader(tokened, batch_size=4, video=False, columns=["tokens"], epochs=1, seed=5) as loader:
        next(loader)
        state = loader.state_dict()
    with Loader(tokened, batch_size=4, video=False, columns=["tokens"], epochs=1, seed=5) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
        assert "4 clips" not in repr(loader) and loader.report().num_enlarged == 0
    assert [b["clip_key"] for b in rest] == [b["clip_key"] for b in whole[1:]]
    for options in ({"frames": 4}, {"fps": 4}, {"size": 64}):
        with pytest.raises(LoaderError, match="video=False delivers no pictures"):
            Loader(tokened, batch_size=4, video=False, **options)
    with pytest.raises(LoaderError, match="frames="):
        Loader(tokened, batch_size=4)
    with pytest.raises(LoaderError, match="video="):
        Loader(tokened, batch_size=4, video="no")


def test_mixed_sizes_do_not_matter_without_pictures(make_version: Callable[..., Any]) -> None:
    mixed = make_version(sizes=((64, 128), (48, 64)))
    assert len(batches(mixed, columns=["motion"])) == 5
