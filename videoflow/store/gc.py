"""Garbage: what killed runs left behind, and nothing else.

Five kinds are found. *data*: files of Lance tables that no version of the table names which anybody may still read (a
write whose unit was never committed, or lost the race; what a compaction has replaced), each with its blob sidecars
``data/<stem>/*``. *manifest*: versions of Lance tables that were replaced long ago. *staging*: records of units that
the ledger has. *version*: folders of versions whose number was claimed, but that were never published. *unfinished*:
see `videoflow.store.unfinished`.

What is spared: everything younger than ``cutoff`` (a grace time, and the oldest running job), every file that a version
names which is current or was so at ``cutoff`` or later, and every file that a staged record names, since any later run
may still commit it. Whole tables are never removed. The order is the argument: objects are listed first, records read
next, manifests last, so a file that moves from written to staged to committed meanwhile is seen in at least one place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

from videoflow.store.damage import check_record, parsed, reading
from videoflow.store.layout import (
    FITS,
    LEDGER,
    SOURCES,
    Root,
    StoredObject,
    is_fingerprint,
    part_number,
    part_path,
    version_dir,
    version_number,
)
from videoflow.store.ledger import Ledger
from videoflow.store.manifests import table_versions
from videoflow.store.unfinished import Unfinished, discard, find_unfinished
from videoflow.store.writer import open_table

DATA, MANIFEST, STAGING, VERSION, UNFINISHED = "data", "manifest", "staging", "version", "unfinished"
#: Top-level folders that hold no artifact tables.
NO_TABLES = frozenset({"staging", "versions", "jobs", FITS, LEDGER, SOURCES})
GRACE_DAYS = 7.0
#: The ledger and the sources are written outside of jobs too, so that no job record protects such a write while it
#: lasts (seconds): their files are spared this long, whatever the grace time.
SHARED_TABLES_MIN_AGE = timedelta(hours=1)


@dataclass(frozen=True)
class Garbage:
    """Something to remove: a data file with its sidecars (``path`` without the suffix), the old versions of a Lance
    table, a staged record, a version's folder, or a write that was never finished.
    """

    kind: str
    path: str
    objects: tuple[StoredObject, ...]
    write: Unfinished | None = None

    @property
    def num_bytes(self) -> int:
        return sum(o.num_bytes for o in self.objects)


def artifact_tables(root: Root) -> list[tuple[str, str]]:
    """(table, fingerprint) of every artifact table below the root."""
    tables = [t for t in root.list_dirs("") if t not in NO_TABLES and not t.startswith(".")]
    return [(t, fp) for t in tables for fp in root.list_dirs(t) if is_fingerprint(fp)]


def by_part(objects: Iterable[StoredObject], folder: str) -> dict[str, list[StoredObject]]:
    """Objects of an artifact table's folder, by the path of the part (a Lance table) that they belong to."""
    parts: dict[str, list[StoredObject]] = {}
    for o in objects:
        name = o.path[len(folder) + 1 :].split("/", 1)[0]
        if part_number(name) is not None:
            parts.setdefault(f"{folder}/{name}", []).append(o)
    return parts


def data_files(objects: Iterable[StoredObject], part: str) -> dict[str, list[StoredObject]]:
    """What lies in a part's ``data/``: by stem, the data file and its sidecars (or an unfinished write's own name)."""
    files: dict[str, list[StoredObject]] = {}
    prefix = f"{part}/data/"
    for o in objects:
        if o.path.startswith(prefix):
            name = o.path[len(prefix) :].split("/", 1)[0]
            files.setdefault(name.removesuffix(".lance"), []).append(o)
    return files


def is_table(objects: Iterable[StoredObject], part: str) -> bool:
    """Whether a manifest was ever written there; what is no table yet is left alone."""
    return any(o.path.startswith(f"{part}/_versions/") and o.path.endswith(".manifest") for o in objects)


def stems_in_use(root: Root, part: str, version: int | None = None) -> set[str]:
    """Stems of the data files that a version names, by default the newest."""
    with reading(root.url, part):
        fragments = open_table(root, part, version=version).get_fragments()
    return {PurePosixPath(f.path).name.removesuffix(".lance") for each in fragments for f in each.data_files()}


def find_garbage(root: Root, ledger: Ledger, *, cutoff: datetime) -> list[Garbage]:
    """All that could be removed; nothing is touched.

    Args:
        cutoff: what was written at or after this moment (UTC) is spared.
    """
    folders = [f"{table}/{fp}" for table, fp in artifact_tables(root)]
    parts = {part: found for f in folders for part, found in by_part(root.objects(f), f).items()}
    parts |= {f"{v}/clips.lance": root.objects(f"{v}/clips.lance") for v in map(_folder_of, published(root))}
    shared = {name: root.objects(name) for name in (LEDGER, SOURCES)}
    unfinished = [
        Garbage(UNFINISHED, u.path, (StoredObject(u.path, u.num_bytes, u.begun),), u)
        for u in find_unfinished(root)
        if u.begun < cutoff
    ]
    versions = list(_unpublished(root, cutoff))
    stale, staged = _records(root, ledger, cutoff)
    garbage = [*stale, *versions, *unfinished]
    for part, objects in parts.items():
        garbage += _of_table(root, part, objects, staged.get(part, set()), cutoff)
    for part, objects in shared.items():
        garbage += _of_table(root, part, objects, set(), cutoff - SHARED_TABLES_MIN_AGE)
    return garbage


def _folder_of(version: str) -> str:
    return f"versions/{version.replace('@', '/')}"


def remove(root: Root, garbage: Iterable[Garbage]) -> None:
    """Remove what `find_garbage` found. Sidecars go first: what is cut short is found again."""
    for g in garbage:
        if g.kind == VERSION and root.has(f"{g.path}/version.json"):  # published meanwhile
            continue
        if g.write is not None:
            discard(root, g.write)
            continue
        for o in sorted(g.objects, key=lambda o: o.path.count("/"), reverse=True):
            root.delete(o.path)
        if g.kind in (DATA, VERSION):
            root.prune(g.path)


def _of_table(
    root: Root, part: str, objects: list[StoredObject], staged: set[str], cutoff: datetime
) -> Iterator[Garbage]:
    """A Lance table's files that no version names which somebody may read, and its old versions."""
    if not is_table(objects, part):
        return
    versions = table_versions(objects, part, cutoff)
    if versions.old:
        yield Garbage(MANIFEST, f"{part}/_versions", versions.old)
    old = {
        stem: found
        for stem, found in data_files(objects, part).items()
        if stem not in staged and all(o.modified < cutoff for o in found)
    }
    for stem in stems_in_use(root, part) if old else ():
        old.pop(stem, None)
    for version in versions.kept[-2::-1]:  # files that were compacted or deleted away since: few tables, few versions
        for stem in stems_in_use(root, part, version) if old else ():
            old.pop(stem, None)
    for stem, found in old.items():
        yield Garbage(DATA, f"{part}/data/{stem}", tuple(found))


def _records(root: Root, ledger: Ledger, cutoff: datetime) -> tuple[list[Garbage], dict[str, set[str]]]:
    """Staged records that are of no use any more, and the stems that the others name, by part."""
    stale: list[Garbage] = []
    stems: dict[str, set[str]] = {}
    units: dict[tuple[str, str], set[str]] = {}
    for o in root.objects(STAGING):
        _, *where, name = o.path.split("/")
        if len(where) != 2 or not is_fingerprint(where[1]):  # not a unit's: what is left of a probe of the store
            if o.modified < cutoff:
                stale.append(Garbage(STAGING, o.path, (o,)))
            continue
        stage, fingerprint = where
        if (stage, fingerprint) not in units:
            units[stage, fingerprint] = ledger.units(stage, fingerprint)
        if o.modified < cutoff and name.removesuffix(".json") in units[stage, fingerprint]:
            stale.append(Garbage(STAGING, o.path, (o,)))
            continue
        record = root.get_json(o.path) if name.endswith(".json") else None
        if record is not None:  # else committed meanwhile: the manifest names its files
            part, names = parsed(root.url, o.path, lambda record=record: _files_of(record))  # type: ignore[misc]
            stems.setdefault(part, set()).update(names)
    return stale, stems


def _files_of(record: dict[str, Any]) -> tuple[str, set[str]]:
    """The part that a staged record writes to, and the stems of its data files."""
    target, fragments = record["target"], [json.loads(f) for f in record["fragments"]]
    part = part_path(str(target["table"]), str(target["fingerprint"]), int(target["part"]))
    return part, {PurePosixPath(f["path"]).name.removesuffix(".lance") for each in fragments for f in each["files"]}


def _unpublished(root: Root, cutoff: datetime) -> Iterator[Garbage]:
    for name in root.list_dirs("versions"):
        for number in filter(version_number, root.list_dirs(f"versions/{name}")):
            folder = f"versions/{name}/{number}"
            objects = root.objects(folder)
            published = any(o.path == f"{folder}/version.json" for o in objects)
            if objects and not published and all(o.modified < cutoff for o in objects):
                yield Garbage(VERSION, folder, tuple(objects))


def published(root: Root) -> dict[str, dict[str, object]]:
    """The manifests of published versions, by ``name@n``."""
    found: dict[str, dict[str, object]] = {}
    for name in root.list_dirs("versions"):
        for number in filter(version_number, root.list_dirs(f"versions/{name}")):
            path = f"{version_dir(name, int(number))}/version.json"
            manifest = root.get_json(path)
            if manifest is not None:
                check_record(root.url, path, manifest, {"tables": dict, "fingerprints": dict})
                found[f"{name}@{number}"] = manifest
    return found
