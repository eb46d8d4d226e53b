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
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import LocalStore, from_url

from videoflow.errors import CatalogError, SystemFailure

CATALOG_FILE = "catalog.json"
LEDGER = "ledger.lance"
SOURCES = "sources.lance"


def part_path(table: str, fingerprint: str, part: int = 0) -> str:
    """Path below the root of one part of an artifact table."""
    return f"{table}/{fingerprint}/part-{part:05d}.lance"


def staging_prefix(stage: str, fingerprint: str) -> str:
    return f"staging/{stage}/{fingerprint}"


def version_dir(name: str, number: int) -> str:
    return f"versions/{name}/{number}"


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
        """True if anything lies at the root (a missing local folder is not made by asking)."""
        if self.is_local and not Path(self.url).is_dir():
            return False
        return self.has(CATALOG_FILE)

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
        except ValueError as e:
            raise CatalogError(f"{self.uri(path)} is not JSON ({e}); it was not written by videoflow") from e
        if not isinstance(value, dict):
            raise CatalogError(f"{self.uri(path)} holds no JSON object; it was not written by videoflow")
        return value

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
        if self.is_local and not Path(self.url, prefix).is_dir():
            return []
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

    def prune(self, folder: str) -> None:
        """Remove a local folder that has become empty, and those inside it. Stores without folders have none."""
        if not self.is_local:
            return
        for here, _, _ in os.walk(Path(self.url, folder), topdown=False):
            with contextlib.suppress(OSError):  # not empty, or filled again meanwhile
                os.rmdir(here)

    def list_dirs(self, prefix: str) -> list[str]:
        """Names of the folders right below a prefix ("": the root), sorted."""
        if self.is_local and not Path(self.url, prefix).is_dir():
            return []
        try:
            result = obstore.list_with_delimiter(self._store, prefix.rstrip("/") + "/" if prefix else None)
        except (NotFoundError, FileNotFoundError):
            return []
        except Exception as e:
            raise self._failure("list", prefix, e) from e
        return sorted(str(p).rstrip("/").rsplit("/", 1)[-1] for p in result["common_prefixes"])

    def _failure(self, what: str, path: str, e: Exception) -> SystemFailure:
        return SystemFailure(f"cannot {what} {self.uri(path)}: {str(e).splitlines()[0][:300]}")
