"""Many of everything, cheaply: thousands of tiny videos, a catalog of a million cached items, a table of fifty thousand
fragments, and an engine that pretends to have worked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import av
import lance
import numpy as np
import psutil
import pyarrow as pa
from lance.fragment import FragmentMetadata

from videoflow.dataset.catalog import Catalog
from videoflow.execute import MAX_CLIPS_PER_UNIT, MAX_ROWS_ITEMS_PER_UNIT, MAX_VIDEOS_PER_UNIT
from videoflow.fingerprint import clip_item_key, pass_item_key, video_item_key
from videoflow.identify import identify
from videoflow.keys import clip_key, digest
from videoflow.recipe import BuiltStage, Recipe
from videoflow.sources import scan
from videoflow.stage import ClipFrames, ClipStage, Product
from videoflow.store import schemas
from videoflow.store.commit import UnitRecord, stage_unit, unit_id
from videoflow.store.ledger import ItemResult
from videoflow.store.writer import Target, create_table, ensure_target, open_table, write_rows
from videoflow.unit import ClipItem, DecodeItem, RowsItem, StageWork, Unit, UnitReport

#: A synthetic video: seconds long, one clip a second; a chunk of the frame cache holds four.
CLIPS_A_VIDEO, CHUNK_SECONDS, FPS, TICKS = 8, 4, 8, 1000
STAGE = "benchmarks.synthetic:Nothing"


class Nothing(ClipStage):
    """A stage that has one row a clip to say and nothing to do."""

    name: ClassVar[str] = "nothing"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "nothing"

    def schema(self) -> pa.Schema:
        return pa.schema([*schemas.ARTIFACT_HEAD, pa.field("clip_key", pa.string()), pa.field("x", pa.float32())])

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        return [Product([{"clip_key": c.clip_key, "x": 0.0}], digest(c.clip_key)) for c in clips]


def recipe() -> Recipe:
    """Videos cut into clips of a second, each clip with something computed of it."""
    stages: dict[str, dict[str, Any]] = {
        "frames": {"fps": FPS},
        "clips": {"by": "windows", "window_seconds": 1},
        "nothing": {"use": STAGE},
    }
    return Recipe(name="synthetic", stages=stages)


def tiny_videos(folder: Path, count: int, *, num_frames: int = 8) -> Path:
    """MP4s of 64×48 and eight frames a second, each with a content of its own; made once."""
    done = folder / ".done"
    if done.is_file() and done.read_text() == str(count):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for i in range(count):
        with av.open(str(folder / f"v{i:06d}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=FPS)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for _ in range(num_frames):
                small = noise.integers(0, 255, (6, 8, 3), np.uint8).repeat(8, axis=0).repeat(8, axis=1)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(small, format="rgb24")))
            container.mux(stream.encode())
    done.write_text(str(count))
    return folder


def hollow_videos(folder: Path, count: int) -> Path:
    """Files that are named like videos and hold only their number: for what never opens them but once."""
    done = folder / ".done"
    if done.is_file() and done.read_text() == str(count):
        return folder
    for i in range(count):
        path = folder / f"{i // 1000:04d}" / f"v{i:07d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"video {i}")
    done.write_text(str(count))
    return folder


# -- a catalog in which everything is cached -------------------------------------------------------------------------


def cached_catalog(root: Path, folder: Path, *, clips_a_video: int) -> Catalog:
    """A catalog as it is after a run of `recipe` over a folder: sources, ledger and clip rows of every video, in units
    of the size a job would cut; of the other tables only that they exist. Nothing is decoded.
    """
    catalog = Catalog.open(root, create=True)
    videos = [v.video_key for v in identify(catalog, scan([str(folder)]), job="synthetic").videos]
    built = {b.key: b for b in recipe().build()}
    for b in built.values():
        if b.key != "clips":
            create_table(catalog.root, f"{b.table}/{b.fingerprint}/part-00000.lance", b.stage.schema())
    for at in range(0, len(videos), MAX_VIDEOS_PER_UNIT):
        some = videos[at : at + MAX_VIDEOS_PER_UNIT]
        for key in ("probe", "frames"):
            _answer(catalog, built[key], [pass_result(built[key], v, 1 + clips_a_video // CHUNK_SECONDS) for v in some])
    for at in range(0, len(videos), MAX_ROWS_ITEMS_PER_UNIT):
        some = videos[at : at + MAX_ROWS_ITEMS_PER_UNIT]
        results = [rows_result(built, v, clips_a_video) for v in some]
        rows = [row for r in results for row in clip_rows(r, clips_a_video)]
        _write(catalog, built["clips"], results, rows)
        answers = [clip_result(built, v, i) for v in some for i in range(clips_a_video)]
        for first in range(0, len(answers), MAX_CLIPS_PER_UNIT):
            _answer(catalog, built["nothing"], answers[first : first + MAX_CLIPS_PER_UNIT])
    return catalog


def pass_result(b: BuiltStage, video: str, rows: int) -> ItemResult:
    return ItemResult(pass_item_key(video, None, b.fingerprint), video, video, digest(b.name, video), rows)


def rows_result(built: dict[str, BuiltStage], video: str, clips: int) -> ItemResult:
    source = digest([["probe", digest("probe", video)]])
    key = video_item_key(video, source, (), built["clips"].fingerprint)
    return ItemResult(key, video, source, digest("clips", video), clips)


def clip_result(built: dict[str, BuiltStage], video: str, i: int) -> ItemResult:
    source = digest(digest("frames", video), 0, str(FPS))
    key = clip_item_key(clip_key(video, 0, i * TICKS, (i + 1) * TICKS), source, built["nothing"].fingerprint)
    return ItemResult(key, video, source, digest(key), 1)


def clip_rows(result: ItemResult, count: int) -> Iterator[dict[str, Any]]:
    """Clips of a second each."""
    for i in range(count):
        yield {
            **_head(result),
            **{"clip_key": clip_key(result.video_key, 0, i * TICKS, (i + 1) * TICKS), "shot": i, "segment": -1},
            **{"t0_pts": i * TICKS, "t1_pts": (i + 1) * TICKS, "tb_num": 1, "tb_den": TICKS, "start_pts": 0},
            **{"t0_us": i * 1_000_000, "t1_us": (i + 1) * 1_000_000, "state": "done"},
            **{"first_frame": i * FPS, "last_frame": i * FPS + FPS - 1, "num_frames": FPS},
        }


def chunk_rows(result: ItemResult, seconds: int) -> Iterator[dict[str, Any]]:
    """Chunks of the frame cache whose pictures are a byte each."""
    for chunk, at in enumerate(range(0, seconds * FPS, CHUNK_SECONDS * FPS)):
        n = min(CHUNK_SECONDS * FPS, seconds * FPS - at)
        pts = [k * TICKS // FPS for k in range(at, at + n)]
        yield {
            **_head(result),
            **{"chunk": chunk, "n": n, "width": 64, "height": 48, "pts": pts, "offsets": list(range(n + 1))},
            **{"digest": digest(result.video_key, chunk), "damage": [], "data": b"x" * n},
        }


def _head(result: ItemResult) -> dict[str, Any]:
    head = {"item_key": result.item_key, "input_digest": result.input_digest}
    return {**head, "video_key": result.video_key, "stream": 0}


def _answer(catalog: Catalog, b: BuiltStage, results: list[ItemResult]) -> None:
    unit = unit_id(b.name, b.fingerprint, (r.item_key for r in results))
    catalog.ledger.append([(b.name, b.fingerprint, unit, r) for r in results], job="synthetic")


def _write(catalog: Catalog, b: BuiltStage, results: list[ItemResult], rows: list[dict[str, Any]]) -> None:
    path = f"{b.table}/{b.fingerprint}/part-00000.lance"
    create_table(catalog.root, path, b.stage.schema())
    table = pa.Table.from_pylist(rows, schema=b.stage.schema())
    lance.write_dataset(table, catalog.root.uri(path), mode="append", data_storage_version="2.2")
    _answer(catalog, b, results)


# -- a table of many fragments ---------------------------------------------------------------------------------------


def fragmented_table(catalog: Catalog, fragments: int) -> Target:
    """An artifact table of that many fragments of one row. They share one file of data: what a commit costs depends on
    the manifest, which names them all.
    """
    schema = Nothing().schema()
    where: dict[str, Any] = {"stage": "nothing", "fingerprint": "f" * 32, "table": "nothing", "schema": schema}
    target = ensure_target(catalog.root, **where)
    row = {"item_key": "0", "input_digest": "0", "video_key": "0", "stream": 0}
    one = write_rows(
        catalog.root, target, schema, lambda: iter([pa.RecordBatch.from_pylist([row], schema=schema)]), expected=1
    )[0]
    dataset = open_table(catalog.root, target.path)
    merged = lance.LanceOperation.Merge(
        [FragmentMetadata.from_json(one) for _ in range(fragments)], dataset.lance_schema
    )
    lance.LanceDataset.commit(dataset, lance.Transaction(dataset.version, merged), enable_stable_row_ids=True)
    return ensure_target(catalog.root, **where)


def one_row_unit(catalog: Catalog, target: Target, key: str) -> UnitRecord:
    """A staged unit of one item, as a worker leaves it."""
    result = ItemResult(key, key, "d", digest(key), 1)
    return _staged(
        catalog.root, StageWork(Nothing(), target.fingerprint, target), [result], [_head(result)], "synthetic"
    )


# -- an engine that pretends -----------------------------------------------------------------------------------------


class Pretender:
    """An engine without workers: answers every unit at once, with rows of the right shape written and staged.

    ``inside_seconds``: CPU time of all that; what is spent between two reports is the driver's. ``samples``: (stage,
    items so far, resident MB) at every report.
    """

    inside_seconds: ClassVar[float] = 0.0
    samples: ClassVar[list[tuple[str, int, float]]] = []

    def __init__(self, *, workers: int, memory_bytes: int | None = None) -> None:
        self._process = psutil.Process()

    def run(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        done = 0
        for unit in units:
            began = time.process_time()
            report = UnitReport(tuple(_pretend(unit, work) for work in unit.works), items=len(unit.items))
            Pretender.inside_seconds += time.process_time() - began
            yield report
            done += report.items
            stage = unit.works[0].stage.name
            Pretender.samples.append((stage, done, self._process.memory_info().rss / 1e6))

    def close(self) -> None: ...


def _pretend(unit: Unit, work: StageWork) -> UnitRecord:
    built = BuiltStage(work.stage.name, work.stage, work.fingerprint)
    results, rows = [], list[dict[str, Any]]()
    for item in unit.items:
        if isinstance(item, DecodeItem):
            chunks = -(-CLIPS_A_VIDEO // CHUNK_SECONDS) if built.name == "frames" else 1
            result = pass_result(built, item.video_key, chunks)
            rows += chunk_rows(result, CLIPS_A_VIDEO) if built.name == "frames" else [_head(result)]
        else:
            assert isinstance(item, (RowsItem, ClipItem))
            is_clip = isinstance(item, ClipItem)
            output = digest("done", item.item_key)
            result = ItemResult(
                item.item_key, item.video_key, item.input_digest, output, 1 if is_clip else CLIPS_A_VIDEO
            )
            rows += [_head(result) | {"clip_key": item.clip.clip_key}] if is_clip else clip_rows(result, CLIPS_A_VIDEO)
        results.append(result)
    return _staged(unit.root, work, results, rows, unit.job)


def _staged(root: Any, work: StageWork, results: list[ItemResult], rows: list[dict[str, Any]], job: str) -> UnitRecord:
    schema = work.stage.schema()
    blobs = [f.name for f in schema if isinstance(f.type, pa.ExtensionType)]
    columns = [
        lance.blob_array([r[f.name] for r in rows])
        if f.name in blobs
        else pa.array([r.get(f.name) for r in rows], f.type)
        for f in schema
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    fragments = write_rows(root, work.target, schema, lambda: iter([batch]), expected=len(rows))
    unit = unit_id(work.target.stage, work.fingerprint, (r.item_key for r in results))
    return stage_unit(root, UnitRecord(unit, work.target, tuple(results), tuple(fragments), job))
