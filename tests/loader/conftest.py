"""A small version with real tables and real JPEGs, whose pictures say which video and which frame they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg

from videoflow.store import schemas
from videoflow.store.blobs import pack_records
from videoflow.timeline import Grid, chunk_of

TIME_BASE = Fraction(1, 30000)
STEP = 1001  # 29.97 frames/s, so that no grid time but the first meets a pts
NUM_SOURCE_FRAMES = 300
CACHE_FPS = Fraction(8)


def paint(video: int, frame: int, height: int = 64, width: int = 128) -> np.ndarray:
    """16 blocks, bright where a bit is set: 6 bits video, 10 bits frame."""
    bits = [(video >> i) & 1 for i in range(6)] + [(frame >> i) & 1 for i in range(10)]
    row = np.repeat(np.array([220 if b else 30 for b in bits], dtype=np.uint8), width // 16)
    return np.ascontiguousarray(np.broadcast_to(row[None, :, None], (height, len(row), 3)))


def read_back(picture: np.ndarray) -> tuple[int, int]:
    """(video, frame) of a picture (H, W, 3) that still shows all blocks."""
    height, width = picture.shape[:2]
    blocks = picture[height // 4 : height * 3 // 4, :, 0].mean(axis=0)[: width // 16 * 16].reshape(16, -1)
    bits = blocks[:, 1:-1].mean(axis=1) > 125
    return sum(1 << i for i in range(6) if bits[i]), sum(1 << i for i in range(10) if bits[6 + i])


@dataclass
class SyntheticVersion:
    """Meets VersionSource. ``clips``: (video, first_grid, grid_count) by position."""

    clips_uri: str
    tables: dict[str, list[str]]
    clips: list[tuple[int, int, int]]
    id: str = "synthetic@1"
    digest: str = "0" * 32
    storage_options: dict[str, str] | None = None
    starts: list[int] = field(default_factory=list)

    def expected(self, position: int, grid_index: int) -> tuple[int, int, float]:
        """(video, source frame, seconds) at a grid index, worked out without the code under test."""
        video, _, _ = self.clips[position]
        frame = (grid_index * 30000 // 8) // STEP
        return video, frame, float((self.starts[video] + frame * STEP) * TIME_BASE)


def _encode(video: int, frame: int, size: tuple[int, int], noise: bool) -> bytes:
    picture = paint(video, frame, *size)
    if noise:
        rng = np.random.default_rng(video * 1000 + frame)
        picture = np.clip(picture.astype(int) + rng.integers(-20, 20, picture.shape), 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(picture, quality=90, colorspace="RGB", colorsubsampling="420")


def _frames_rows(video: int, start: int, size: tuple[int, int], corrupt: Any, noise: bool) -> list[dict[str, Any]]:
    grid = Grid(start, TIME_BASE, CACHE_FPS)
    pts = [start + i * STEP for i in range(NUM_SOURCE_FRAMES)]
    chunks: dict[int, list[tuple[int, bytes]]] = {}
    for i, p in enumerate(pts):
        if grid.is_kept(p, p + STEP):
            c = chunk_of(p, start_pts=start, time_base=TIME_BASE, chunk_seconds=Fraction(4))
            chunks.setdefault(c, []).append((p, _encode(video, i, size, noise)))
    rows = []
    for c, records in chunks.items():
        data, offsets = pack_records(records)
        if corrupt is not None:
            data = corrupt(video, c, data, offsets)
        head = {"item_key": f"{video:032x}", "input_digest": "0" * 32, "video_key": f"{video:032x}", "stream": 0}
        shape = {"chunk": c, "n": len(records), "height": size[0], "width": size[1], "damage": None}
        times = {"pts": [p for p, _ in records], "offsets": offsets}
        rows.append({**head, **shape, **times, "digest": "0" * 32, "data": data})
    return rows


def _write(rows: list[dict[str, Any]], schema: pa.Schema, uri: str) -> list[int]:
    """Row ids by row."""
    columns: dict[str, Any] = {name: [r[name] for r in rows] for name in schema.names if name != "data"}
    if "data" in schema.names:
        columns["data"] = lance.blob_array([r["data"] for r in rows])
    table = pa.table(columns, schema=schema)
    dataset = lance.write_dataset(table, uri, data_storage_version="2.2", enable_stable_row_ids=True)
    return dataset.scanner(columns=[], with_row_id=True).to_table()["_rowid"].to_pylist()


def _refs(rows: list[tuple[int, int, dict[str, Any]]], grid: Grid, first: int, count: int) -> list[dict[str, int]]:
    pts = [p for _, _, row in rows for p in row["pts"]]
    at = grid.frame_positions(pts, [first, first + count - 1])
    wanted = set(pts[at[0] : at[1] + 1])
    refs = []
    for part, row_id, row in rows:
        inside = [i for i, p in enumerate(row["pts"]) if p in wanted]
        if inside:
            a, b = row["offsets"][inside[0]], row["offsets"][inside[-1] + 1]
            refs.append({"part": part, "row_id": row_id, "offset": a, "length": b - a})
    return refs


def build_version(
    root: Path,
    *,
    num_videos: int = 5,
    clips: Sequence[tuple[int, int, int]] | None = None,
    sizes: Sequence[tuple[int, int]] = ((64, 128),),
    corrupt: Callable[[int, int, bytes, list[int]], bytes] | None = None,
    noise: bool = False,
    without_embedding: Sequence[int] = (),
) -> SyntheticVersion:
    """Write frames (two parts), embeddings and clips; ``sizes`` go round the videos."""
    if clips is None:
        clips = [(v, 3 + 11 * i, (16, 20, 24, 17)[(v + i) % 4]) for v in range(num_videos) for i in range(5)][:-2]
    starts = [90_000 + 777 * v for v in range(num_videos)]
    per_video: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    uris = []
    for part, videos in enumerate((range(0, num_videos, 2), range(1, num_videos, 2))):
        rows = [r for v in videos for r in _frames_rows(v, starts[v], sizes[v % len(sizes)], corrupt, noise)]
        uris.append(str(root / f"frames/part-{part:05d}.lance"))
        if rows:
            for row_id, row in zip(_write(rows, schemas.FRAMES, uris[-1]), rows, strict=True):
                per_video.setdefault(int(row["item_key"], 16), []).append((part, row_id, row))
    vectors = str(root / "embeddings/part-00000.lance")
    ids = _write([_embedding(n, v) for n, (v, _, _) in enumerate(clips)], schemas.embeddings(4, pa.float16()), vectors)
    found = [None if n in without_embedding else i for n, i in enumerate(ids)]
    rows = [_clip(n, c, starts, sizes, rows=per_video[c[0]], embedding=found[n]) for n, c in enumerate(clips)]
    extra = [pa.field("caption", pa.string()), pa.field("likes", pa.int32())]
    schema = pa.schema([*schemas.VERSION_HEAD, *schemas.POOLED_SCORES, *extra])
    uri = str(root / "versions/synthetic/1/clips.lance")
    lance.write_dataset(pa.Table.from_pylist(rows, schema=schema), uri, data_storage_version="2.2")
    return SyntheticVersion(uri, {"frames": uris, "embeddings": [vectors]}, list(clips), starts=starts)


def _embedding(n: int, video: int) -> dict[str, Any]:
    head = {"item_key": f"{n:032x}", "input_digest": "0" * 32, "video_key": f"{video:032x}", "stream": 0}
    return {**head, "clip_key": f"{n + 1:032x}", "num_frames": 4, "vector": np.array([n, -n, 0.5, 1], np.float16)}


def _clip(
    n: int, clip: tuple[int, int, int], starts: list[int], sizes: Any, *, rows: Any, embedding: int | None
) -> dict[str, Any]:
    video, first, count = clip
    grid = Grid(starts[video], TIME_BASE, CACHE_FPS)
    height, width = sizes[video % len(sizes)]
    return {
        "position": n,
        "clip_key": f"{n + 1:032x}",
        "t0_pts": grid.last_pts_at(first),
        "t1_pts": grid.last_pts_at(first + count),
        "tb_num": TIME_BASE.numerator,
        "tb_den": TIME_BASE.denominator,
        "start_pts": starts[video],
        "video_key": f"{video:032x}",
        "split": "val" if n % 5 == 4 else "train",
        "width": width,
        "height": height,
        "cache_fps_num": CACHE_FPS.numerator,
        "cache_fps_den": CACHE_FPS.denominator,
        "first_grid": first,
        "grid_count": count,
        "frames": _refs(rows, grid, first, count),
        "embedding": None if embedding is None else {"part": 0, "row_id": embedding},
        "motion": n / 2,
        "caption": f"clip {n}",
        "likes": None if n == 3 else n,
    }


@pytest.fixture(scope="session")
def version(tmp_path_factory: pytest.TempPathFactory) -> SyntheticVersion:
    """23 clips of 5 videos, 16 to 24 cached frames each, 64 × 128."""
    return build_version(tmp_path_factory.mktemp("version"))


@pytest.fixture
def make_version(tmp_path: Path) -> Callable[..., SyntheticVersion]:
    """Builds a version of one's own; see ``build_version``."""

    def make(**options: Any) -> SyntheticVersion:
        return build_version(tmp_path / f"v{len(list(tmp_path.iterdir()))}", **options)

    return make


@pytest.fixture
def read_picture() -> Callable[[np.ndarray], tuple[int, int]]:
    return read_back
