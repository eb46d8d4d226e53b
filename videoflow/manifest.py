"""Manifests: tables that name videos and say things about them.

A manifest has a column ``uri`` (relative ones are relative to the manifest). ``start`` and ``end`` together make the
row a clip of its own, in seconds of stream time; seconds are read as exact decimals. All other columns are metadata.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from videoflow.errors import SourceError
from videoflow.timeline import exact_fraction

MANIFEST_EXTENSIONS = frozenset({".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"})
_TIME_COLUMNS = ("start", "end")


@dataclass(frozen=True)
class ManifestRow:
    """``location``: absolute path or URL; ``interval``: (start, end) seconds, None for the whole video."""

    location: str
    metadata: dict[str, Any]
    interval: tuple[Fraction, Fraction] | None


def read_manifest(source: str) -> Iterator[ManifestRow]:
    """Rows of a manifest at a local path or URL.

    Raises:
        SourceError: unreadable, no column ``uri``, or a row that makes no sense (numbered from 1).
    """
    table = _read_table(source)
    if "uri" not in table.column_names:
        raise SourceError(
            f"manifest {source} has no column uri; its columns are {', '.join(table.column_names) or 'none'}"
        )
    _check_names(source, table.column_names)
    one_sided = [c for c in _TIME_COLUMNS if c in table.column_names]
    if len(one_sided) == 1:
        raise SourceError(
            f"manifest {source} has a column {one_sided[0]} without its counterpart; clips need start and end"
        )
    base = source.rsplit("/", 1)[0] if "://" in source else os.path.dirname(os.path.abspath(source))
    for number, row in enumerate(table.to_pylist(), 1):
        uri = row.pop("uri")
        if not isinstance(uri, str) or not uri.strip():
            raise SourceError(f"manifest {source} row {number}: uri is {uri!r}")
        interval = _interval(row.pop("start", None), row.pop("end", None), f"manifest {source} row {number}")
        yield ManifestRow(_absolute(uri.strip(), base), {k: v for k, v in row.items() if v is not None}, interval)


def _check_names(source: str, names: list[str]) -> None:
    """Columns become columns of a Lance table, whose rules are checked here, before any work."""
    for name in names:
        if not name or "." in name or name.startswith("_") or names.count(name) > 1:
            why = "twice" if names.count(name) > 1 else "a name that is empty, begins with _ or holds a dot"
            raise SourceError(f"manifest {source}: column {name!r} cannot be used ({why}); rename it")


def _absolute(uri: str, base: str) -> str:
    if "://" in uri and not uri.startswith("file://"):
        return uri
    uri = uri.removeprefix("file://")
    if os.path.isabs(uri):
        return uri
    return f"{base}/{PurePosixPath(uri)}" if "://" in base else os.path.normpath(os.path.join(base, uri))


def _interval(start: Any, end: Any, where: str) -> tuple[Fraction, Fraction] | None:
    if start in (None, "") and end in (None, ""):
        return None
    try:
        interval = (exact_fraction(start), exact_fraction(end))
    except (ValueError, ZeroDivisionError) as e:
        raise SourceError(f"{where}: start and end must be seconds, given {start!r} and {end!r}") from e
    if interval[0] >= interval[1]:
        raise SourceError(f"{where}: start {start} is not before end {end}")
    return interval


def _read_table(source: str) -> pa.Table:
    suffix = PurePosixPath(source).suffix.lower()
    try:
        data = _read_bytes(source)
        if suffix == ".parquet":
            return pyarrow.parquet.read_table(pa.BufferReader(data))
        if suffix in (".csv", ".tsv"):
            # Times are kept as text: a float would lose what the person wrote.
            types = pyarrow.csv.ConvertOptions(
                column_types={c: pa.string() for c in ("uri", *_TIME_COLUMNS)}, strings_can_be_null=True
            )
            delimiter = "," if suffix == ".csv" else "\t"
            return pyarrow.csv.read_csv(
                io.BytesIO(data), pyarrow.csv.ReadOptions(), pyarrow.csv.ParseOptions(delimiter=delimiter), types
            )
        return pyarrow.json.read_json(io.BytesIO(data))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as e:
        raise SourceError(f"cannot read manifest {source}: {' '.join(str(e).split())[:200]}") from e


def _read_bytes(source: str) -> bytes:
    if "://" in source:
        import fsspec

        with fsspec.open(source, "rb") as f:
            return bytes(f.read())
    with open(source, "rb") as f:
        return f.read()
