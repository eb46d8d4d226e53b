"""Properties of time: a pts that goes into the cache comes out of the loader's reader as it was, whatever the time base,
the start, the steps between frames, the cuts and the rate.
"""

from __future__ import annotations

import tempfile
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from videoflow.dataset.assemble import cached_videos, place_clip, version_table
from videoflow.loader.reader import ClipReader
from videoflow.loader.rows import load_rows
from videoflow.loader.sampling import FrameCount, sample_clips
from videoflow.stage import Item, ShownFrame, VideoHeader, VideoSummary
from videoflow.store import schemas
from videoflow.store.blobs import iter_records, pack_records
from videoflow.store.layout import Root, part_path
from videoflow.timeline import pts_to_us
from workers.clips import Clips, ClipsParams
from workers.frames import Frames, FramesParams

KEY, FP = "a" * 32, "0" * 32
INT64 = st.integers(-(2**63), 2**63 - 1)
TIME_BASES = st.sampled_from(
    [Fraction(1, d) for d in (25, 30, 90_000, 1_200_000, 48_000, 1001)] + [Fraction(1001, 30_000)]
)


@given(st.lists(st.tuples(INT64, st.binary(max_size=40)), max_size=20), st.data())
def test_records_bring_back_pts_and_bytes(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    blob, offsets = pack_records(frames)
    assert [(r.pts, bytes(r.payload)) for r in iter_records(blob)] == frames
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(frames))] * 2)))
    assert [(r.pts, bytes(r.payload)) for r in iter_records(blob[offsets[a] : offsets[b]])] == frames[a:b]


class Flat:
    """A picture that is cheap to encode."""

    geometry = None

    def __init__(self) -> None:
        self.geometry = self  # type: ignore[assignment]

    def fit_short_side(self, short_side: int) -> tuple[int, int]:
        return 16, 16

    def jpeg_planes(self, width: int, height: int) -> None:
        return None

    def rgb(self, width: int, height: int) -> np.ndarray:
        return np.zeros((height, width, 3), np.uint8)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Fraction, list[int], int]:
    """(time base, pts of the shown frames, end): constant or variable steps, any start, at most about 20 s."""
    time_base = draw(TIME_BASES)
    most = max(1, int(Fraction(1, 2) / time_base))
    count = draw(st.integers(1, 40))
    if draw(st.booleans()):
        steps = [draw(st.integers(1, most))] * count
    else:
        steps = draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
    start = draw(st.integers(-(2**33), 2**33))
    edges = [start]
    for step in steps:
        edges.append(edges[-1] + step)
    return time_base, edges[:-1], edges[-1]


def cache(stream: tuple[Fraction, list[int], int], params: FramesParams) -> list[dict[str, Any]]:
    """Rows of the frame cache, by the stage itself."""
    time_base, pts, end = stream
    stage, rows = Frames(params), []
    stage.begin(VideoHeader(KEY, 0, time_base, pts[0]))
    for i, (p, following) in enumerate(pairwise([*pts, end])):
        rows += stage.see(ShownFrame(i, p, following, Flat()))  # type: ignore[arg-type]
    rows += stage.finish(VideoSummary(len(pts), end, ())).rows
    return [dict(r) for r in rows]


def clips_of(stream: tuple[Fraction, list[int], int], cuts: list[int], params: ClipsParams) -> list[dict[str, Any]]:
    time_base, pts, end = stream
    probe = {"stream": 0, "tb_num": time_base.numerator, "tb_den": time_base.denominator, "start_pts": pts[0]}
    probe |= {"pts": pts, "end_pts": end, "damage": []}
    found = Clips(params).process(Item(KEY, {"probe": [probe], "shots": [{"cuts": cuts, "scores": []}]}))
    head = {"item_key": KEY, "input_digest": FP, "video_key": KEY, "stream": 0}
    return [{**head, **row} for row in found.rows]


def write(rows: list[dict[str, Any]], schema: pa.Schema, uri: str) -> None:
    columns: dict[str, Any] = {name: [r.get(name) for r in rows] for name in schema.names if name != "data"}
    if "data" in schema.names:
        columns["data"] = lance.blob_array([r["data"] for r in rows])
    lance.write_dataset(pa.table(columns, schema=schema), uri, data_storage_version="2.2", enable_stable_row_ids=True)


@settings(max_examples=15)
@given(streams(), st.sampled_from(["8", "2", "25", "30000/1001", "1/2"]), st.sampled_from([1, 4]), st.data())
def test_pts_survive_from_the_decoder_to_the_loader(
    stream: tuple[Fraction, list[int], int], fps: str, chunk_seconds: int, data: st.DataObject
) -> None:
    time_base, pts, end = stream
    rate = Fraction(fps)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(pts) - 1)), max_size=4))) if len(pts) > 1 else []
    params = ClipsParams(
        min_seconds=data.draw(st.sampled_from([0, 0.3])), max_seconds=data.draw(st.sampled_from([0.5, 3, 10]))
    )
    head = {"item_key": KEY, "input_digest": FP, "video_key": KEY, "stream": 0, "damage": None}
    chunks = [{**head, **r} for r in cache(stream, FramesParams(fps=fps, chunk_seconds=chunk_seconds))]
    with tempfile.TemporaryDirectory() as folder:
        root, part = Root.at(folder), part_path("frames", FP)
        write(chunks, schemas.FRAMES, root.uri(part))
        video = cached_videos(root, [part], [KEY])[KEY]
        # What is cached: at every grid time the last shown frame, once.
        num_grid = -(-(end - pts[0]) * time_base * rate // 1)
        wanted = [at_or_before(pts, pts[0] * time_base + k / rate, time_base) for k in range(int(num_grid))]
        assert video.pts == sorted(set(wanted))
        placed = [
            c for r in clips_of(stream, cuts, params) if r["state"] == "done" and (c := place_clip(r, video, rate))
        ]
        for clip in placed:
            (read,) = ClipReader([root.uri(part)]).read([clip.ref], [clip.indices])
            times = [(pts[0] * time_base + k / rate, k) for k in clip.indices]
            assert all(clip.row["t0_pts"] * time_base <= t < clip.row["t1_pts"] * time_base for t, _ in times)
            assert list(read.pts) == [at_or_before(pts, t, time_base) for t, _ in times]
            assert read.pts_seconds.tolist() == [float(p * time_base) for p in read.pts]
            assert (
                clip.row["t0_us"]
                == pts_to_us(clip.row["t0_pts"], time_base)
                == clip.row["t0_pts"] * time_base * 10**6 // 1
            )
        if placed:
            through_a_version(Path(folder), root, part, placed)


def at_or_before(pts: list[int], t: Fraction, time_base: Fraction) -> int:
    return max(p for p in pts if p * time_base <= t)


def through_a_version(folder: Path, root: Root, part: str, placed: list[Any]) -> None:
    """The same frames by the rows of a version, as the loader takes them."""
    table = version_table([placed], sources={KEY: ("uri", {})}, splits={KEY: "train"}, embeddings={}, scores={})
    uri = str(folder / "clips.lance")
    lance.write_dataset(table, uri, data_storage_version="2.2")
    source: Any = type("Source", (), {"clips_uri": uri, "storage_options": None, "id": "x@1", "tables": {}})
    rows = load_rows(source, split=None, where=None, columns=())
    ints = rows.ints
    rates = (ints["cache_fps_num"], ints["cache_fps_den"])
    sampling = sample_clips(
        grid_count=ints["grid_count"],
        cache_fps=rates,
        frames=FrameCount(1, 1),
        fps=None,
        short="pad",
        allow_uneven=False,
    )
    grids = [sampling.grid_indices(i, int(ints["first_grid"][i])).tolist() for i in range(len(rows))]
    assert grids == [list(c.indices) for c in placed]
    reader = ClipReader([root.uri(part)])
    by_rows = [list(c.pts) for c in reader.read(rows.clip_refs(np.arange(len(rows))), grids)]
    assert by_rows == [list(c.pts) for c in reader.read([c.ref for c in placed], [c.indices for c in placed])]


@given(streams(), st.data())
def test_clips_tile_the_clean_part_of_every_shot(stream: tuple[Fraction, list[int], int], data: st.DataObject) -> None:
    """Done and filtered clips together: no gap, no overlap, no damage, nothing of another shot."""
    time_base, pts, end = stream
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(pts) - 1)), max_size=6))) if len(pts) > 1 else []
    edges = data.draw(st.lists(st.integers(pts[0] - 5, end + 5), unique=True, max_size=6))
    damage = list(pairwise(sorted(edges)))[::2]
    params = ClipsParams(
        min_seconds=data.draw(st.floats(0, 0.4)), max_seconds=data.draw(st.floats(0.4, 20)), by="shots"
    )
    probe = {"stream": 0, "tb_num": time_base.numerator, "tb_den": time_base.denominator, "start_pts": pts[0]}
    probe |= {"pts": pts, "end_pts": end, "damage": [{"t0_pts": a, "t1_pts": b} for a, b in damage]}
    found = Clips(params).process(Item(KEY, {"probe": [probe], "shots": [{"cuts": cuts, "scores": []}]}))
    rows = [dict(r) for r in found.rows]
    is_clean = [not any(a <= p < b for a, b in damage) for p in pts]
    held = [f for r in rows for f in range(r["first_frame"], r["last_frame"] + 1)]
    assert held == [i for i, clean in enumerate(is_clean) if clean]
    shot_of = [sum(c <= i for c in cuts) for i in range(len(pts))]
    for row in rows:
        frames = range(row["first_frame"], row["last_frame"] + 1)
        assert len({shot_of[f] for f in frames}) == 1
        assert row["t0_pts"] == pts[row["first_frame"]]
        shown_until = [*pts, end][row["last_frame"] + 1]
        cut_off = [a for a, b in damage if row["t0_pts"] < a < shown_until]
        assert row["t1_pts"] == min([shown_until, *cut_off])
    for a, b in pairwise(rows):
        assert a["t1_pts"] <= b["t0_pts"]
        if a["t1_pts"] < b["t0_pts"]:
            assert any(x <= a["t1_pts"] and a["t1_pts"] < y for x, y in damage)
