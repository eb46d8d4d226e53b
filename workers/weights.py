"""Digests of weights: of the bytes in a file or folder, wherever it lies. Another file is another fingerprint, another
path is not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from videoflow.errors import MissingWeights
from videoflow.keys import digest, digest_file


def weights_folder(path: str | None, *, needed_for: str, files: Iterable[str]) -> Path:
    """A local folder that holds certain files.

    Raises:
        MissingWeights: not given, no folder, or one of the files is not in it.
    """
    if path is None:
        raise MissingWeights(f"{needed_for} needs weights: the path of a local folder with {', '.join(files)}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise MissingWeights(f"no folder {path} for {needed_for}; give the path of a local folder")
    for name in files:
        if not (folder / name).is_file():
            there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise MissingWeights(f"{needed_for}: no {name} in {path}; there is {there}")
    return folder


def weights_digest(path: str | Path, suffixes: tuple[str, ...] = ()) -> str:
    """Digest of a file's bytes, or of the names and bytes of the files in a folder (with certain suffixes only).

    Raises:
        MissingWeights: nothing is there.
    """
    where = Path(path).expanduser()
    if where.is_file():
        return _file_digest(*_stamp(where))
    files = sorted(p for p in where.rglob("*") if p.is_file() and (not suffixes or p.suffix in suffixes))
    if not files:
        raise MissingWeights(f"no weights at {path}; give the path of a local file or folder")
    return digest("folder", [[p.relative_to(where).as_posix(), _file_digest(*_stamp(p))] for p in files])


def _stamp(path: Path) -> tuple[str, int, int]:
    info = os.stat(path)
    return str(path), info.st_size, info.st_mtime_ns


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    """Hashed once a process as long as the file stays as it is: a plan asks several times for gigabytes."""
    return digest_file(path)
