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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import LocalStore, from_url

from videoflow.errors import CatalogError, SystemFailure, VideoflowError
from videoflow.persist import TRIES, WAIT_SECONDS, is_passing, lance_options, obstore_options, storage_failure
from videoflow.store.s3 import S3Access

CATALOG_FILE = "catalog.json"
LEDGER = "ledger.lance"
SOURCES = "sources.lance"
_FAIL = object()


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
        environment (see `videoflow.store.s3`), and are looked up anew in every process.
    """

    url: str
    storage_options: dict[str, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def at(root: str | os.PathLike[str], storage_options: dict[str, str] | None = None) -> Root:
        """A root by path or URL.

        Raises:
            CatalogError: a URL with credentials or a query in it, or without a bucket.
        """
        text = os.fspath(root)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        elif text.startswith("file://"):
            text = text[len("file://") :]
        else:
            text = _checked_url(text)
        return Root(text.rstrip("/") or "/", dict(storage_options or {}))

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @cached_property
    def _store(self) -> Any:
        if self.is_local:
            return LocalStore(self.url, mkdir=True)
        given: dict[str, Any] = {"config": {**self.storage_options}, "retry_config": obstore_options()}
        if self.s3:
            given["config"] = {**self.s3.place, **self.storage_options}
            given["credential_provider"] = self.s3.credentials
            given["client_options"] = {"allow_http": self.s3.is_plain_http}
        return from_url(self.url, **given)

    @cached_property
    def s3(self) -> S3Access | None:
        """How the bucket is reached; None for other stores.

        Raises:
            SystemFailure: there are no credentials.
        """
        return S3Access(self.url) if self.url.startswith("s3://") else None

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
        """Lance's storage options: where to go and how often to ask; never credentials of ours."""
        if self.is_local:
            return dict(self.storage_options) or None
        place = {**self.s3.place, "allow_http": str(self.s3.is_plain_http).lower()} if self.s3 else {}
        return {**lance_options(), **place, **self.storage_options}

    def has(self, path: str) -> bool:
        return self._ask("look up", path, lambda: obstore.head(self._store, path) is not None, missing=False)

    def get(self, path: str) -> bytes | None:
        """Bytes of an object, None if it is not there."""
        return self._ask("read", path, lambda: bytes(obstore.get(self._store, path).bytes()), missing=None)

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
        """Write an object unless one is there (atomic, on every store). False if another one was there.

        A put that was carried out may be answered with an error, and the next try with "there is one": what lies there
        tells whose it is. So what several may write at once must hold a nonce.

        Raises:
            CatalogError: the store has no such put.
        """
        for i in range(1, TRIES + 1):
            try:
                obstore.put(self._store, path, data, mode="create")
            except (AlreadyExistsError, FileExistsError):
                return not self.is_local and self.get(path) == data
            except VideoflowError:
                raise
            except Exception as e:
                if "501 Not Implemented" in str(e) or isinstance(e, NotImplementedError):
                    raise CatalogError(no_conditional_puts(self)) from e
                if i == TRIES or not is_passing(e):
                    raise self._failure("write", path, e) from e
            else:
                return True
            time.sleep(WAIT_SECONDS * i)
        raise AssertionError("unreachable")

    def put(self, path: str, data: bytes) -> None:
        """Write or replace an object."""
        self._ask("write", path, lambda: obstore.put(self._store, path, data), missing=_FAIL)

    def delete(self, path: str) -> None:
        """Remove an object; one that is gone already is fine."""
        self._ask("remove", path, lambda: obstore.delete(self._store, path), missing=None)

    def paths(self, prefix: str) -> Iterator[str]:
        """Paths of the objects below a prefix, sorted."""
        return iter([o.path for o in self.objects(prefix)])

    def objects(self, prefix: str) -> list[StoredObject]:
        """The objects below a prefix with their sizes and times, by path."""
        if self.is_local and not Path(self.url, prefix).is_dir():
            return []

        def listed() -> list[StoredObject]:
            return [
                StoredObject(str(m["path"]), int(m["size"]), m["last_modified"])
                for batch in obstore.list(self._store, prefix)
                for m in batch
            ]

        found: list[StoredObject] = self._ask("list", prefix, listed, missing=[])
        return sorted(found, key=lambda o: o.path)

    def has_any(self, prefix: str, suffix: str = "") -> bool:
        """Whether an object below a prefix has a name that ends so; looks no further than it must."""
        if self.is_local and not Path(self.url, prefix).is_dir():
            return False

        def found() -> bool:
            return any(str(m["path"]).endswith(suffix) for batch in obstore.list(self._store, prefix) for m in batch)

        return self._ask("list", prefix, found, missing=False)

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
        below = prefix.rstrip("/") + "/" if prefix else None
        result = self._ask("list", prefix, lambda: obstore.list_with_delimiter(self._store, below), missing=None)
        folders = result["common_prefixes"] if result else []
        return sorted(str(p).rstrip("/").rsplit("/", 1)[-1] for p in folders)

    def _ask(self, what: str, path: str, work: Callable[[], Any], *, missing: Any) -> Any:
        """The answer of the store, asked again where that may help; ``missing`` if nothing is there."""
        for i in range(1, TRIES + 1):
            try:
                return work()
            except VideoflowError:  # no credentials
                raise
            except Exception as e:  # obstore raises its own family per backend
                is_missing = isinstance(e, (NotFoundError, FileNotFoundError)) and "NoSuchBucket" not in str(e)
                if is_missing and missing is not _FAIL:
                    return missing
                if i == TRIES or not is_passing(e):
                    raise self._failure(what, path, e) from e
            time.sleep(WAIT_SECONDS * i)
        raise AssertionError("unreachable")

    def _failure(self, what: str, path: str, e: Exception) -> SystemFailure:
        return storage_failure(f"cannot {what} {self.uri(path)}", e)


def no_conditional_puts(root: Root) -> str:
    """Why a store is refused."""
    return (
        f"the store at {root.url} has no atomic put-if-absent, without which a catalog could lose or double data; use "
        "one that honours If-None-Match (AWS S3, MinIO, R2, Ceph since Squid), or a local folder"
    )


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise CatalogError(
            f"root {parts.scheme}://{parts.netloc.rsplit('@', 1)[-1]}{parts.path}: no credentials and no query in a "
            "root, which is stored and printed; set AWS_ACCESS_KEY_ID, AWS_PROFILE and the like"
        )
    if not parts.netloc:
        raise CatalogError(f"root {url} names no bucket; a root is a folder or a URL such as s3://bucket/prefix")
    return url
