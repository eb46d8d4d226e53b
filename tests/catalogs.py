"""What a catalog holds, for comparing two of them, on a folder or on S3."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

import lance

import videoflow
from videoflow.keys import digest_bytes
from videoflow.store.gc import MANIFEST, SHARED_TABLES_MIN_AGE, artifact_tables, find_garbage, remove
from videoflow.store.layout import LEDGER, SOURCES, Root
from videoflow.store.writer import open_table, parts_of

Where = str | os.PathLike[str]


def facts(where: Where) -> dict[tuple, tuple]:
    """Everything the ledger says of results, without when and by whom."""
    rows = videoflow.open(where).ledger.table(None).to_pylist()
    newest: dict[tuple, dict] = {}
    for r in rows:
        key = (r["stage"], r["fingerprint"], r["item_key"])
        if key not in newest or newest[key]["at"] <= r["at"]:
            newest[key] = r
    return {k: (r["state"], r["class"], r["rows"], r["output_digest"]) for k, r in newest.items()}


def parts(root: Root) -> list[str]:
    return [f"{t}/{fp}/part-{n:05d}.lance" for t, fp in artifact_tables(root) for n in parts_of(root, t, fp)]


def item_rows(where: Where) -> dict[str, list[str]]:
    """Row keys of every artifact table over all its parts, for counting doubles; of frames also the digests, which are
    held against the bytes.
    """
    root, found = Root.at(where), {}
    for path in parts(root):
        d = open_table(root, path)
        extra = [c for c in ("chunk", "clip_key", "digest") if c in d.schema.names]
        table = d.to_table(columns=["item_key", *extra, *(["offsets"] if "digest" in extra else [])], with_row_id=True)
        rows = table.to_pylist()
        if "digest" in extra:
            _check_bytes(d, rows)
        keys = [str([r[c] for c in ("item_key", *extra)]) for r in rows]
        found.setdefault(path.rsplit("/", 1)[0], []).extend(keys)
    return {table: sorted(keys) for table, keys in found.items()}


def _check_bytes(dataset: lance.LanceDataset, rows: list[dict]) -> None:
    ranges = [(r["_rowid"], 0, r["offsets"][-1]) for r in rows]
    for request, _, data in dataset.read_blob_ranges("data", ranges, selector="ids") if rows else []:
        assert digest_bytes(bytes(data)) == rows[request]["digest"]


def assert_same(where: Where, undisturbed: Where, *, name: str = "x") -> None:
    """Keys, states and digests are equal, no row is there twice, none is lost, and every byte can be loaded."""
    assert facts(where) == facts(undisturbed)
    rows = item_rows(where)
    assert rows == item_rows(undisturbed)
    assert all(len(set(keys)) == len(keys) for keys in rows.values())
    assert not list(Root.at(where).paths("staging"))
    version = videoflow.open(where).version(name)
    assert version.digest == videoflow.open(undisturbed).version(name).digest
    with version.loader(batch_size=4, frames=4, fps=8, size=64, epochs=1, tail="pad") as loader:
        assert sum(int(b["valid"].sum()) for b in loader) == len(version)


def assert_gc_leaves_no_orphan(where: Where) -> int:
    """Collect all garbage; afterwards every data file is named by a manifest. How much garbage there was, old versions
    apart.
    """
    catalog = videoflow.open(where)
    root = catalog.root
    all_of_it = datetime.now(UTC) + SHARED_TABLES_MIN_AGE + timedelta(seconds=5)
    garbage = find_garbage(root, catalog.ledger, cutoff=all_of_it)
    remove(root, garbage)
    tables = [*parts(root), LEDGER, SOURCES]
    tables += [f"versions/{v.name}/{v.number}/clips.lance" for v in catalog.versions()]
    for path in tables:
        fragments = open_table(root, path).get_fragments()
        named = {PurePosixPath(f.path).name.removesuffix(".lance") for each in fragments for f in each.data_files()}
        there = {p[len(path) + 6 :].split("/")[0].removesuffix(".lance") for p in root.paths(f"{path}/data")}
        assert there == named, path
        assert len([p for p in root.paths(f"{path}/_versions") if p.endswith(".manifest")]) == 1
    return sum(g.kind != MANIFEST for g in garbage)
