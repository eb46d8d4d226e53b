"""Nearest clips by embedding, exactly: cosine over all vectors of a version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from videoflow.dataset.version import Version
from videoflow.errors import QueryError
from videoflow.store.damage import reading
from videoflow.store.writer import open_table


def search_clip(version: Version, clip_key: str, k: int) -> list[dict[str, Any]]:
    """The k clips nearest to ``clip_key``, best first, without itself.

    Returns:
        ``clip_key, score (cosine, −1…1), uri, t0_us, t1_us`` each.

    Raises:
        QueryError: no embeddings in this version, no such clip, or a clip without one.
    """
    if k < 1:
        raise QueryError(f"k must be at least 1, not {k}")
    if not version.manifest["tables"].get("embeddings"):
        raise QueryError(f"{version.id} has no embeddings; its recipe has no stage embed")
    rows = version.clips(columns=["clip_key", "uri", "t0_us", "t1_us", "embedding"])
    keys = rows["clip_key"].to_pylist()
    if clip_key not in keys:
        ask = f'videoflow query ROOT {version.id} "SELECT clip_key, uri, t0_us FROM clips"'
        raise QueryError(f"no clip {clip_key!r} in {version.id}; its clips: {ask}")
    vectors, has = _vectors(version, keys, rows["embedding"])
    query = keys.index(clip_key)
    if not has[query]:
        raise QueryError(f"clip {clip_key} of {version.id} has no embedding")
    scores = vectors @ vectors[query]
    scores[~has] = -np.inf
    scores[query] = -np.inf
    best = np.argsort(-scores, kind="stable")[: min(k, int(has.sum()) - 1)]
    head = rows.select(["clip_key", "uri", "t0_us", "t1_us"]).take(pa.array(best)).to_pylist()
    return [
        {
            "clip_key": r["clip_key"],
            "score": float(scores[i]),
            "uri": r["uri"],
            "t0_us": r["t0_us"],
            "t1_us": r["t1_us"],
        }
        for i, r in zip(best, head, strict=True)
    ]


def _vectors(version: Version, keys: list[str], refs: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """L2-normalised vectors float32 (n, D), zero where a clip has none, and which have one (n,)."""
    by_part: dict[int, list[tuple[int, int]]] = {}
    for i, ref in enumerate(refs.to_pylist()):
        if ref is not None and ref["row_id"] is not None:
            by_part.setdefault(ref["part"], []).append((i, ref["row_id"]))
    found: dict[int, np.ndarray] = {}
    for part, wanted in by_part.items():
        paths = version.manifest["tables"]["embeddings"]
        path = paths[part] if 0 <= part < len(paths) else f"embeddings, part {part}"
        with reading(version.root.url, path):
            dataset = open_table(version.root, path)
            table = dataset._take_rows([row_id for _, row_id in wanted], columns=["clip_key", "vector"])
            table.validate(full=True)
        by_key = dict(zip(table["clip_key"].to_pylist(), table["vector"].to_pylist(), strict=True))
        for i, _ in wanted:  # a missing row is dropped silently: compare by key
            if keys[i] in by_key:
                found[i] = np.asarray(by_key[keys[i]], np.float32)
    dim = len(next(iter(found.values()))) if found else 1
    vectors, has = np.zeros((len(keys), dim), np.float32), np.zeros(len(keys), bool)
    for i, vector in found.items():
        vectors[i] = vector / max(float(np.linalg.norm(vector)), 1e-12)
        has[i] = True
    return vectors, has
