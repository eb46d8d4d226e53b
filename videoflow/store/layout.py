"""Where things lie under a catalog's root, and how to reach them: one object for a local folder and for a bucket
prefix.

catalog.json                              format number, secret, what the store can do
sources.lance  ledger.lance               append-only tables
<table>/<fingerprint>/part-00000.lance    artifact tables: videos, frames, shots, quality, clips, embeddings, <stage>
<table>/<fingerprint>/fingerprint.json    what the fingerprint is made of
staging/<stage>/<fingerprint>/<unit>.json written, not yet committed units
versions/<name>/<n>/clips.lance           a dataset version's rows; version.json beside it publishes it
jobs/<job>.json  .log  .cancel            job records, what they said, and who asked them to stop
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import LocalStore, from_url

from videoflow.errors import CatalogError, DamagedCatalog, SystemFailure, shown
from videoflow.store.damage import damaged

CATALOG_FILE = "catalog.json"
LEDGER = "ledger.lance"
SOURCES = "sources.lance"


def part_path(table: str, fingerprint: str, part: int = 0) -> str:
    """Path below the root of one part of an artifact table."""
    return f"{table}/{fingerprint}/part-{part:05d}.lance"


def part_number(name: str) -> int | None:
    """The number of a part by its folder's name; None for what is no part, whatever lies there."""
    found = re.fullmatch(r"part-([0-9]{5,9})\.lance", name)
    return int(found[1]) if found else None


def is_fingerprint(name: str) -> bool:
    """True for the name of an artifact table's folder; others (``.ipynb_checkpoints``) are not ours."""
    return re.fullmatch(r"[0-9a-f]{32}", name) is not None


def version_number(name: str) -> int | None:
    """The number of a version by its folder's name; None for what is none."""
    return int(name) if re.fullmatch(r"[1-9][0-9]{0,8}", name) else None


_OWN = frozenset({CATALOG_FILE, LEDGER, SOURCES, "staging", "versions", "jobs"})


def is_own(root: str, name: str) -> bool:
    """Whether a name right below a local catalog's root is the catalog's own, and not a neighbour's."""
    if name in _OWN:
        return True
    with contextlib.suppress(OSError):
        return any(
            is_fingerprint(e.name) and Path(e.path, "fingerprint.json").is_file() for e in os.scandir(Path(root, name))
        )
    return False


def is_own_object(path: str) -> bool:
    """The same of an object's path below the root of a catalog in a store."""
    head, _, rest = path.partition("/")
    return head in _OWN or is_fingerprint(rest.partition("/")[0])


def staging_prefix(stage: str, fingerprint: str) -> str:
    return f"staging/{stage}/{fingerprint}"


def version_dir(name: str, number: int) -> str:
    return f"versions/{name}/{number}"


def _check_root(text: str) -> None:
    """Raises CatalogError for what cannot be a root anywhere."""
    if not text.strip():
        raise CatalogError("the root is empty: give a folder or URL, like --root catalog")
    if any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text):
        raise CatalogError(
            f"root {shown(text)} cannot be used: its name is no UTF-8 text, or holds a control character"
        )


@dataclass(frozen=True)
class StoredObject:
    """An object below the root, as a listing shows it."""

    path: str
    num_bytes: int
    modified: datetime  # UTC


@dataclass(frozen=True)
class Root:
    """A catalog's root: small objects by path through obstore, Lance tables by URI.

    Attributes:
        url: an absolute local path, or ``s3://bucket/prefix`` and the like.
        storage_options: for Lance and obstore; never printed. Endpoint and credentials normally come from the
        environment.
    """

    url: str
    storage_options: dict[str, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def at(root: str | os.PathLike[str], storage_options: dict[str, str] | None = None) -> Root:
        text = os.fspath(root)
        _check_root(text)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        elif text.startswith("file://"):
            text = text[len("file://") :]
        return Root(text.rstrip("/") or "/", dict(storage_options or {}))

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @cached_property
    def _store(self) -> Any:
        if self.is_local:
            return LocalStore(self.url, mkdir=True)
        return from_url(self.url, config=self.storage_options or None)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Root, (self.url, self.storage_options))

    def exists(self) -> bool:
        """True if anything lies at the root (a missing local folder is not made by asking).

        Raises:
            CatalogError: a file is in the way.
        """
        if self.is_local and not Path(self.url).is_dir():
            in_the_way = next((p for p in (Path(self.url), *Path(self.url).parents) if os.path.lexists(p)), None)
            if in_the_way is not None and not in_the_way.is_dir():
                raise CatalogError(f"no catalog can be at {self.url}: {in_the_way} is no folder")
            return False
        return self.has(CATALOG_FILE)

    def make(self) -> None:
        """Make a local root's folder, and those above it.

        Raises:
            SystemFailure: it cannot be made or written to.
        """
        if not self.is_local:
            return
        try:
            os.makedirs(self.url, exist_ok=True)
        except OSError as e:
            raise SystemFailure(f"cannot make the folder {self.url}: {e.strerror}") from e
        if not os.access(self.url, os.W_OK | os.X_OK):
            raise SystemFailure(f"cannot make a catalog in {self.url}: no permission to write there")

    def uri(self, path: str) -> str:
        """URI of a path below the root, for Lance."""
        return f"{self.url}/{path}"

    def lance_options(self) -> dict[str, str] | None:
        return dict(self.storage_options) or None

    def has(self, path: str) -> bool:
        try:
            obstore.head(self._store, path)
        except (NotFoundError, FileNotFoundError):
            return False
        except Exception as e:  # obstore raises its own family per backend
            raise self._failure("look up", path, e) from e
        return True

    def get(self, path: str) -> bytes | None:
        """Bytes of an object, None if it is not there."""
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except (NotFoundError, FileNotFoundError):
            return None
        except Exception as e:
            raise self._failure("read", path, e) from e

    def get_json(self, path: str) -> dict[str, Any] | None:
        data = self.get(path)
        if data is None:
            return None
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise damaged(self.url, path, f"no JSON: {' '.join(str(e).split())[:120]}") from e
        if not isinstance(value, dict):
            raise damaged(self.url, path, "no JSON object")
        return value

    def peek_json(self, path: str) -> dict[str, Any] | None:
        """A JSON object that only explains things: a damaged one counts as missing."""
        try:
            return self.get_json(path)
        except DamagedCatalog:
            return None

    def put_new(self, path: str, data: bytes) -> bool:
        """Write an object unless one is there (atomic, on every store). False if one was there."""
        try:
            obstore.put(self._store, path, data, mode="create")
        except (AlreadyExistsError, FileExistsError):
            return False
        except Exception as e:
            raise self._failure("write", path, e) from e
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write or replace an object."""
        try:
            obstore.put(self._store, path, data)
        except Exception as e:
            raise self._failure("write", path, e) from e

    def delete(self, path: str) -> None:
        """Remove an object; one that is gone already is fine."""
        try:
            if self.is_local:
                Path(self.url, path).unlink()
            else:
                obstore.delete(self._store, path)
        except (NotFoundError, FileNotFoundError):
            return
        except Exception as e:
            raise self._failure("remove", path, e) from e

    def paths(self, prefix: str) -> Iterator[str]:
        """Paths of the objects below a prefix, sorted."""
        return iter([o.path for o in self.objects(prefix)])

    def objects(self, prefix: str) -> list[StoredObject]:
        """The objects below a prefix with their sizes and times, by path."""
        if self.is_local:
            return sorted(self._local_objects(prefix), key=lambda o: o.path)
        try:
            found = [
                StoredObject(str(m["path"]), int(m["size"]), m["last_modified"])
                for batch in obstore.list(self._store, prefix)
                for m in batch
            ]
        except (NotFoundError, FileNotFoundError):
            found = []
        except Exception as e:
            raise self._failure("list", prefix, e) from e
        return sorted(found, key=lambda o: o.path)

    def _local_objects(self, prefix: str) -> Iterator[StoredObject]:
        """The same from the folder itself: obstore fails at a name that is no text or holds a newline."""
        seen: set[tuple[int, int]] = set()
        for here, folders, names in os.walk(Path(self.url, prefix), onerror=self._unlistable, followlinks=True):
            below = os.path.relpath(here, self.url)
            info = os.stat(here)
            if (info.st_dev, info.st_ino) in seen:  # a link to a folder above
                folders.clear()
                continue
            seen.add((info.st_dev, info.st_ino))
            for name in names:
                with contextlib.suppress(FileNotFoundError, UnicodeEncodeError):  # gone meanwhile, or not ours
                    name.encode()
                    stat = os.stat(Path(here, name))
                    path = name if below == "." else f"{below}/{name}"
                    yield StoredObject(path, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))

    def _unlistable(self, e: OSError) -> None:
        if not isinstance(e, (FileNotFoundError, NotADirectoryError)):
            raise SystemFailure(f"cannot list {e.filename}: {e.strerror}") from e

    def prune(self, folder: str) -> None:
        """Remove a local folder that has become empty, and those inside it. Stores without folders have none."""
        if not self.is_local:
            return
        for here, _, _ in os.walk(Path(self.url, folder), topdown=False):
            with contextlib.suppress(OSError):  # not empty, or filled again meanwhile
                os.rmdir(here)

    def list_dirs(self, prefix: str) -> list[str]:
        """Names of the folders right below a prefix ("": the root), sorted."""
        if self.is_local:
            try:
                names = [e.name for e in os.scandir(Path(self.url, prefix)) if e.is_dir()]
            except OSError as e:
                self._unlistable(e)
                return []
            return sorted(n for n in names if n.isprintable())
        try:
            result = obstore.list_with_delimiter(self._store, prefix.rstrip("/") + "/" if prefix else None)
        except (NotFoundError, FileNotFoundError):
            return []
        except Exception as e:
            raise self._failure("list", prefix, e) from e
        return sorted(str(p).rstrip("/").rsplit("/", 1)[-1] for p in result["common_prefixes"])

    def _failure(self, what: str, path: str, e: Exception) -> SystemFailure:
        return SystemFailure(f"cannot {what} {self.uri(path)}: {str(e).splitlines()[0][:300]}")
