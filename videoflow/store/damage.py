"""Telling damage: what Lance, Arrow or a JSON parser says of a file below the root becomes one line with the remedy.

Every reader of tables and records goes through here, so that a flipped byte, a lost data file or half a record ends as
`DamagedCatalog`, whoever met it. What can be computed again is removed by hand and computed again; what cannot has to
come from a backup.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from videoflow.errors import DamagedCatalog, SystemFailure, VideoflowError
from videoflow.persist import TRIES, WAIT_SECONDS, is_passing, storage_failure, told

T = TypeVar("T")

#: Folders below the root that are no artifact tables, and what to do about a damaged file in them.
_REMEDIES = {
    "versions": "restore it from a backup, or remove the folder {folder}: the next run publishes the clips again",
    "jobs": "remove it: only the record of that job is lost",
    "staging": "remove it: its unit is computed again",
    "fits": "restore it from a backup, or remove it: the next run learns another, and computes anew what hangs on it",
    "ledger.lance": "restore the folder from a backup: it is the only record of what was computed",
    "sources.lance": "restore the folder from a backup, or remove all of it: sources are then read again",
    "catalog.json": "restore it from a backup",
}
#: Signs that the way to the file is at fault, not the file.
_TRANSPORT = re.compile(
    r"Generic (?!LocalFileSystem|N/A|memory)\w+ error|sending request|tim(?:ed|e) ?out|connection|credential|forbidden"
    r"|unauthorized|(?:permission|access) denied|slow ?down|throttl|dispatch failure|too many open files"
    r"|\(os error (?!2\))\d+\)",
    re.IGNORECASE,
)
_TABLE_REMEDY = "restore it from a backup, or remove the folder {folder}: the next run computes its results again"


def remedy(root_url: str, path: str) -> str:
    """What to do about a damaged file at a path below the root."""
    head, *rest = path.split("/")
    depth = 3 if head == "versions" else 2
    folder = "/".join([root_url, *[head, *rest][:depth]])
    return _REMEDIES.get(head, _TABLE_REMEDY).format(folder=folder)


def damaged(root_url: str, path: str, why: str) -> DamagedCatalog:
    """The error for a damaged file."""
    return DamagedCatalog(f"{root_url}/{path} is damaged ({why}); {remedy(root_url, path)}")


def is_panic(e: BaseException) -> bool:
    """True for a failed assertion inside a Rust library, which Python sees as no Exception."""
    return type(e).__name__ == "PanicException"


@contextlib.contextmanager
def reading(root_url: str, path: str) -> Iterator[None]:
    """While a Lance table below the root is opened or read.

    Raises:
        DamagedCatalog: what was raised inside says so. SystemFailure: the store could not be asked.
    """
    try:
        yield
    except BaseException as e:
        raise _judged(root_url, path, e) from e


def read(root_url: str, path: str, work: Callable[[], T]) -> T:
    """What is read of a Lance table below the root; asked again where the way to it fails, not the file.

    Raises:
        DamagedCatalog: what was raised inside says so. SystemFailure: the store could not be asked.
    """
    for i in range(1, TRIES + 1):
        try:
            return work()
        except BaseException as e:
            failure = _judged(root_url, path, e)
            passing = isinstance(failure, SystemFailure) and isinstance(e, Exception) and is_passing(e)
            if i == TRIES or not passing or failure is e:
                raise failure from e
        time.sleep(WAIT_SECONDS * 2 ** (i - 1))
    raise AssertionError("unreachable")


def _judged(root_url: str, path: str, e: BaseException) -> BaseException:
    """The error to raise: Lance raises OSError, ValueError, RuntimeError and panics for the same faults."""
    if isinstance(e, (VideoflowError, MemoryError)) or not (isinstance(e, Exception) or is_panic(e)):
        return e
    text = told(e)
    if _TRANSPORT.search(text):
        return storage_failure(f"cannot read {root_url}/{path}", e)
    return damaged(root_url, path, text)


def check_record(root_url: str, path: str, record: Mapping[str, Any], needs: Mapping[str, Any]) -> None:
    """Raises DamagedCatalog unless a JSON record has these keys with values of these types (or tuples of types)."""
    for key, kind in needs.items():
        value = record.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise damaged(root_url, path, f"its {key} is {'missing' if key not in record else 'of a wrong type'}")


def parsed(root_url: str, path: str, parse: Callable[[], T]) -> T:
    """What ``parse`` makes of a record; one that it stumbles over is damaged."""
    try:
        return parse()
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise damaged(root_url, path, f"{type(e).__name__}: {told(e)}") from e
