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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import LocalStore, from_url

from videoflow.errors import CatalogError, DamagedCatalog, SystemFailure, VideoflowError, shown
from videoflow.persist import TRIES, WAIT_SECONDS, is_passing, lance_options, obstore_options, storage_failure
from videoflow.store.damage import damaged
from videoflow.store.s3 import S3Access

CATALOG_FILE = "catalog.json"
LEDGER = "ledger.lance"
SOURCES = "sources.lance"
#: What stages have learned from the data, see `videoflow.fitting`.
FITS = "fits"
_FAIL = object()


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


_OWN = frozenset({CATALOG_FILE, LEDGER, SOURCES, "staging", "versions", "jobs", FITS})


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
        _check_root(text)
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
        if not self.is_local:
            self._ask("remove", path, lambda: obstore.delete(self._store, path), missing=None)
            return
        try:
            Path(self.url, path).unlink()
        except FileNotFoundError:
            return
        except OSError as e:
            raise self._failure("remove", path, e) from e

    def paths(self, prefix: str) -> Iterator[str]:
        """Paths of the objects below a prefix, sorted."""
        return iter([o.path for o in self.objects(prefix)])

    def objects(self, prefix: str) -> list[StoredObject]:
        """The objects below a prefix with their sizes and times, by path."""
        if self.is_local:
            return sorted(self._local_objects(prefix), key=lambda o: o.path)

        def listed() -> list[StoredObject]:
            return [
                StoredObject(str(m["path"]), int(m["size"]), m["last_modified"])
                for batch in obstore.list(self._store, prefix)
                for m in batch
            ]

        found: list[StoredObject] = self._ask("list", prefix, listed, missing=[])
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

    def has_any(self, prefix: str, suffix: str = "") -> bool:
        """Whether an object below a prefix has a name that ends so; looks no further than it must."""
        if self.is_local:
            return any(o.path.endswith(suffix) for o in self._local_objects(prefix))

        def found() -> bool:
            return any(str(m["path"]).endswith(suffix) for batch in obstore.list(self._store, prefix) for m in batch)

        return bool(self._ask("list", prefix, found, missing=False))

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
