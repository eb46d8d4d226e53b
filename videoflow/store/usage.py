"""What lies where in a catalog, and who uses it: bytes, rows and fragments by artifact table and by version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from videoflow.store.damage import reading
from videoflow.store.gc import UNFINISHED, Garbage, artifact_tables, by_part, find_garbage, is_table, published
from videoflow.store.layout import CATALOG_FILE, FITS, LEDGER, SOURCES, Root, StoredObject
from videoflow.store.ledger import Ledger
from videoflow.store.writer import open_table

TABLE, VERSION, OTHER = "table", "version", "other"


@dataclass(frozen=True)
class Usage:
    """One line of `videoflow du`.

    Attributes:
        kind: ``table`` (an artifact table), ``version``, or ``other`` (ledger, sources, staging, jobs, …).
        path: below the root. stage: its name, as the ledger or the table's own note has it.
        num_bytes: all of it; orphan_bytes: of these, what `gc` would remove without a grace time (while a job runs,
        what it is writing counts as well); manifest_bytes: of these, Lance's own manifests and transactions.
        versions: published versions that use the table. is_newest: its stage has no newer fingerprint.
    """

    kind: str
    path: str
    stage: str = ""
    rows: int = 0
    fragments: int = 0
    num_bytes: int = 0
    orphan_bytes: int = 0
    manifest_bytes: int = 0
    versions: tuple[str, ...] = field(default=())
    is_newest: bool = True

    @property
    def is_reclaimable(self) -> bool:
        """True if the table may be removed by hand: no version uses it and its stage has a newer fingerprint. A later
        run that wants it computes it again.
        """
        return self.kind == TABLE and not self.versions and not self.is_newest


def usage(root: Root, ledger: Ledger, *, now: datetime) -> list[Usage]:
    """Everything below the root, each object in exactly one line."""
    manifests = published(root)
    garbage = find_garbage(root, ledger, cutoff=now)
    stages = _stages(ledger)
    newest = _newest(stages)
    lines = []
    for table, fingerprint in artifact_tables(root):
        users = tuple(v for v, m in manifests.items() if _uses(m, table, fingerprint))
        note = root.peek_json(f"{table}/{fingerprint}/fingerprint.json") or {}
        stage = str(note.get("stage") or next((s for s, fp in stages if fp == fingerprint), ""))
        is_newest = newest.get(stage, fingerprint) == fingerprint
        folder = f"{table}/{fingerprint}"
        objects = root.objects(folder)
        parts = [part for part, found in by_part(objects, folder).items() if is_table(found, part)]
        sizes = _sizes(objects, garbage)
        lines.append(Usage(TABLE, folder, stage, *_counts(root, parts), **sizes, versions=users, is_newest=is_newest))
    for version in manifests:
        folder = f"versions/{version.replace('@', '/')}"
        lines.append(
            Usage(
                VERSION, folder, "", *_counts(root, [f"{folder}/clips.lance"]), **_sizes(root.objects(folder), garbage)
            )
        )
    lines += _others(root, garbage)
    return [*lines, *_strays(root, lines)]


def _strays(root: Root, lines: list[Usage]) -> Iterator[Usage]:
    """What somebody else put below the root: folders of editors and file managers, notes."""
    ours = tuple(f"{u.path.split(' ')[0]}/" for u in lines)
    found = [o for o in root.objects("") if not o.path.startswith(ours) and o.path != CATALOG_FILE]
    if found:
        yield Usage(OTHER, "files that are not the catalog's", rows=len(found), **_sizes(found))


def _others(root: Root, garbage: list[Garbage]) -> Iterator[Usage]:
    yield Usage(OTHER, CATALOG_FILE, num_bytes=len(root.get(CATALOG_FILE) or b""))
    for name in (LEDGER, SOURCES):
        yield Usage(OTHER, name, "", *_counts(root, [name]), **_sizes(root.objects(name), garbage))
    for name in ("staging", "jobs", FITS):
        objects = root.objects(name)
        if objects:
            yield Usage(OTHER, name, rows=len(objects), **_sizes(objects, garbage))
    for g in garbage:
        if g.kind == VERSION:
            yield Usage(OTHER, f"{g.path} (never published)", **_sizes(g.objects, garbage))
        if g.kind == UNFINISHED:
            yield Usage(OTHER, f"{g.path} (never finished)", **_sizes(g.objects, garbage))


def _counts(root: Root, parts: Iterable[str]) -> tuple[int, int]:
    """Rows and fragments of Lance tables together."""
    rows = fragments = 0
    for part in parts:
        with reading(root.url, part):
            dataset = open_table(root, part)
            rows, fragments = rows + dataset.count_rows(), fragments + len(dataset.get_fragments())
    return rows, fragments


def _sizes(objects: Iterable[StoredObject], garbage: Iterable[Garbage] = ()) -> dict[str, Any]:
    orphans = {o.path for g in garbage for o in g.objects}
    total = manifests = unused = 0
    for o in objects:
        total += o.num_bytes
        unused += o.num_bytes if o.path in orphans else 0
        if "/_versions/" in o.path or "/_transactions/" in o.path:
            manifests += o.num_bytes
    return {"num_bytes": total, "manifest_bytes": manifests, "orphan_bytes": unused}


def _uses(manifest: dict[str, Any], table: str, fingerprint: str) -> bool:
    """Whether a version was made from a table: it refers into it, or was computed through it."""
    parts = [p for paths in manifest["tables"].values() for p in paths]
    folder = f"{table}/{fingerprint}/"
    return fingerprint in manifest["fingerprints"].values() or any(p.startswith(folder) for p in parts)


def _stages(ledger: Ledger) -> dict[tuple[str, str], datetime]:
    """When each (stage, fingerprint) was last written to."""
    rows = ledger.table(["stage", "fingerprint", "at"])
    last = rows.group_by(["stage", "fingerprint"]).aggregate([("at", "max")])
    return {(r["stage"], r["fingerprint"]): r["at_max"] for r in last.to_pylist()}


def _newest(stages: dict[tuple[str, str], datetime]) -> dict[str, str]:
    """The fingerprint of each stage that was written to last."""
    newest: dict[str, tuple[datetime, str]] = {}
    for (stage, fingerprint), at in stages.items():
        if stage not in newest or newest[stage][0] < at:
            newest[stage] = (at, fingerprint)
    return {stage: fingerprint for stage, (_, fingerprint) in newest.items()}
