"""A catalog: a root folder or bucket prefix that holds everything, and the way in for people.

import videoflow
catalog = videoflow.open("/data/catalog")
version = catalog.version("mine@3")
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from videoflow.dataset.version import Version
from videoflow.dataset.video import Video
from videoflow.errors import CatalogError, DamagedCatalog, QueryError
from videoflow.store import schemas
from videoflow.store.damage import check_record
from videoflow.store.layout import CATALOG_FILE, LEDGER, SOURCES, Root, version_dir, version_number
from videoflow.store.ledger import Ledger
from videoflow.store.probe import probe_store
from videoflow.store.reader import read_rows
from videoflow.store.states import newest
from videoflow.store.writer import append_rows, create_table

#: Rows that become Python objects at once.
ROWS_AT_ONCE = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: What a version.json holds at least.
_VERSION_RECORD = {
    "clips": int,
    "videos": int,
    "recipe": dict,
    "created": str,
    "digest": str,
    "tables": dict,
    "fingerprints": dict,
}


@dataclass(frozen=True)
class VersionInfo:
    """One published dataset version, as `versions` lists it."""

    name: str
    number: int
    clips: int
    videos: int
    recipe: str
    created: str
    digest: str

    @property
    def id(self) -> str:
        return f"{self.name}@{self.number}"


class KnownSource(NamedTuple):
    """What the catalog knows of one source: a tuple, since a plan holds a hundred thousand. ``metadata`` is JSON."""

    uri: str
    size: int | None
    stamp: str | None
    video_key: str
    metadata: str | None


class Catalog:
    """An open catalog. Nothing is cached here but the root: two processes see each other's commits."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.ledger = Ledger(root)

    def __repr__(self) -> str:
        return f"Catalog({self.root.url!r})"

    @staticmethod
    def open(root: str | os.PathLike[str], *, create: bool = False) -> Catalog:
        """Open a catalog, or make one where there is none if ``create``.

        Raises:
            CatalogError: no catalog there, or one of a newer format.
        """
        where = Root.at(root)
        description = where.get_json(CATALOG_FILE) if where.exists() else None
        if description is None:
            if not create:
                raise CatalogError(f"no catalog at {where.url}; `videoflow run … --root {where.url}` makes one")
            where.make()
            _create(where)
            description = where.get_json(CATALOG_FILE) or {}
        check_record(where.url, CATALOG_FILE, description, {"format": int, "secret": str})
        number = description["format"]
        if number > schemas.FORMAT_NUMBER:
            raise CatalogError(
                f"the catalog at {where.url} has format {number!r}, this videoflow knows up to "
                f"{schemas.FORMAT_NUMBER}; install a newer videoflow"
            )
        return Catalog(where)

    # -- sources -----------------------------------------------------------------------------------------------------

    def known_sources(self) -> dict[str, KnownSource]:
        """Newest row of every source, by uri."""
        table = newest(read_rows(self.root, SOURCES, [*KnownSource._fields, "at"]), ["uri"])
        found, texts = {}, dict[str, str]()  # most sources have the same metadata: none
        for batch in table.select(KnownSource._fields).to_batches(ROWS_AT_ONCE):
            for uri, size, stamp, key, metadata in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                found[uri] = KnownSource(uri, size, stamp, key, texts.setdefault(metadata, metadata))
        return found

    def add_sources(self, rows: list[dict[str, Any]], *, job: str) -> None:
        now = datetime.now(UTC)
        if rows:
            full = [{**r, "job": job, "at": now} for r in rows]
            append_rows(self.root, SOURCES, pa.Table.from_pylist(full, schema=schemas.SOURCES))

    def video(self, uri_or_key: str) -> Video:
        """The video of a source's uri or of a video key, opened at its source.

        Raises:
            QueryError: unknown, or its source lies where no local file is.
        """
        for uri, row in self.known_sources().items():
            if uri_or_key in (uri, row.video_key) and "://" not in uri:
                return Video(uri)
        raise QueryError(f"no local source {uri_or_key!r} in {self.root.url}")

    # -- versions ----------------------------------------------------------------------------------------------------

    def versions(self, name: str | None = None, *, bad: list[str] | None = None) -> list[VersionInfo]:
        """Published versions, by name and number. Damaged ones are left out; ``bad`` takes a line about each."""
        found = []
        for each in [name] if name else [n for n in self.root.list_dirs("versions") if _NAME.fullmatch(n)]:
            for number in self.version_numbers(each):
                try:
                    m = self._manifest(each, number)
                except DamagedCatalog as e:
                    if bad is not None:
                        bad.append(str(e))
                    continue
                if m is not None:
                    recipe = str(m["recipe"].get("name", ""))
                    found.append(VersionInfo(each, number, m["clips"], m["videos"], recipe, m["created"], m["digest"]))
        return found

    def _manifest(self, name: str, number: int) -> dict[str, Any] | None:
        """``version.json`` of a version, None if it was never published.

        Raises:
            DamagedCatalog: it is not what `publish` writes.
        """
        path = f"{version_dir(name, number)}/version.json"
        manifest = self.root.get_json(path)
        if manifest is not None:
            check_record(self.root.url, path, manifest, _VERSION_RECORD)
        return manifest

    def version_numbers(self, name: str) -> list[int]:
        """Numbers of a name's folders, ascending; one without a version.json was never published."""
        return sorted(filter(None, map(version_number, self.root.list_dirs(f"versions/{check_name(name)}"))))

    def version(self, ref: str) -> Version:
        """A version by ``name@n``, or the newest of ``name``.

        Raises:
            QueryError: there is none; what there is, is listed. DamagedCatalog: it is there and damaged.
        """
        name, _, number = ref.partition("@")
        check_name(name)
        if number and version_number(number) is None:
            raise QueryError(f"version {ref!r} is not of the form name@n")
        numbers = [int(number)] if number else self.version_numbers(name)[::-1]
        for n in numbers:
            manifest = self._manifest(name, n)
            if manifest is not None:
                return Version(self.root, name, n, manifest)
        there = ", ".join(v.id for v in self.versions()) or "none"
        raise QueryError(f"no version {ref} in {self.root.url}; there are: {there}")

    # -- what went wrong ---------------------------------------------------------------------------------------------

    def quarantine(self) -> list[dict[str, Any]]:
        """One row a uri whose video (or one of whose clips) is quarantined: ``uri, class, stage, message``. What is to
        be tried again (`videoflow.dataset.retry`) is not among them until it has failed again.
        """
        columns = ["stage", "item_key", "video_key", "state", "class", "message", "at"]
        last: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self.ledger.table(columns).to_pylist():
            by = (row["stage"], row["item_key"] if row["stage"] not in _VIDEO_GRAIN else row["video_key"])
            if by not in last or last[by]["at"] <= row["at"]:
                last[by] = row
        bad: dict[str, dict[str, Any]] = {}
        for row in sorted(last.values(), key=lambda r: (r["stage"] != "probe", r["at"])):
            if row["state"] == "quarantined":
                bad.setdefault(row["video_key"], row)
        uris: dict[str, list[str]] = {}
        for uri, source in self.known_sources().items():
            uris.setdefault(source.video_key, []).append(uri)
        return [
            {"uri": uri, "class": row["class"], "stage": row["stage"], "message": row["message"]}
            for key, row in bad.items()
            for uri in sorted(uris.get(key, []))
        ]


#: Stages of one item a video: a newer result under another fingerprint replaces an older one. Other stages' items are
#: clips, of which one video has many.
_VIDEO_GRAIN = frozenset({"sources", "probe", "frames", "shots", "quality", "clips"})


def check_name(name: str) -> str:
    """A version's name as given.

    Raises:
        QueryError: it cannot be a folder's name everywhere.
    """
    if not _NAME.fullmatch(name):
        raise QueryError(
            f"version name {name!r}: use letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def _create(root: Root) -> None:
    """Make a catalog where the store can hold one; of two makers one wins, the tables are made by whoever comes
    first.
    """
    able = probe_store(root)
    create_table(root, LEDGER, schemas.LEDGER)
    create_table(root, SOURCES, schemas.SOURCES)
    description = {
        "format": schemas.FORMAT_NUMBER,
        "secret": secrets.token_hex(32),
        "created": datetime.now(UTC).isoformat(),
        "store": able,
    }
    root.put_new(CATALOG_FILE, json.dumps(description, indent=1).encode())
