"""Manifests: tables that name videos and say things about them.

A manifest has a column ``uri`` (relative ones are relative to the manifest). ``start`` and ``end`` together make the
row a clip of its own, in seconds of stream time; seconds are read as exact decimals. All other columns are metadata and
keep what the file says: a CSV column becomes numbers only where every number would be written back letter by letter
(docs/sources.md). Mistakes are named with the line as an editor counts it, or the row.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from videoflow.errors import SourceError, shown
from videoflow.timeline import exact_fraction

MANIFEST_EXTENSIONS = frozenset({".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"})
_TIME_COLUMNS = ("start", "end")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
#: Characters of a CSV field: a quote that is left open shows here, and no caption does.
LONGEST_FIELD = 16 << 20
INT64 = range(-(1 << 63), 1 << 63)
#: Integers up to here are exact as floats.
EXACT_IN_FLOAT = 1 << 53


@dataclass(frozen=True)
class ManifestRow:
    """``location``: absolute path or URL; ``interval``: (start, end) seconds, None for the whole video; ``where``: the
    manifest and the row's place in it, for messages.
    """

    location: str
    metadata: dict[str, Any]
    interval: tuple[Fraction, Fraction] | None
    where: str = ""


#: Where a row stands, for messages ("line 3, row 2"), and its values by column; None and "" are no value.
_Rows = Iterable[tuple[str, dict[str, Any]]]


def read_manifest(source: str, *, name: str | None = None) -> Iterator[ManifestRow]:
    """Rows of a manifest at a local path or URL; ``name`` is how messages call it.

    Raises:
        SourceError: unreadable, no column ``uri``, or a row that makes no sense (with its line, counted from 1).
    """
    name = f"manifest {name or source}"
    columns, rows = _read(source, name)
    if "uri" not in columns:
        raise SourceError(f"{name} has no column uri; its columns are {', '.join(columns) or 'none'}")
    _check_names(name, columns)
    one_sided = [c for c in _TIME_COLUMNS if c in columns]
    if len(one_sided) == 1:
        raise SourceError(f"{name} has a column {one_sided[0]} without its counterpart; clips need start and end")
    base = source.rsplit("/", 1)[0] if "://" in source else os.path.dirname(os.path.abspath(source))
    for where, row in rows:
        uri = row.get("uri")
        if not isinstance(uri, str) or not uri.strip():
            raise SourceError(f"{name} {where}: uri is {shown(uri)}")
        interval = _interval(row.get("start"), row.get("end"), f"{name} {where}")
        metadata = {k: v for k, v in row.items() if v not in (None, "") and k not in ("uri", *_TIME_COLUMNS)}
        for key, value in metadata.items():
            _check_value(value, f"{name} {where}: {key}")
        yield ManifestRow(_absolute(uri.strip(), base), metadata, interval, f"{name} {where}")


def _check_names(name: str, columns: list[str]) -> None:
    """Columns become columns of a Lance table, whose rules are checked here, before any work."""
    for column in columns:
        if not column or "." in column or column.startswith("_") or columns.count(column) > 1:
            why = "twice" if columns.count(column) > 1 else "a name that is empty, begins with _ or holds a dot"
            raise SourceError(f"{name}: column {column!r} cannot be used ({why}); rename it")


def _check_value(value: Any, what: str) -> None:
    """Raises SourceError for what neither a table nor JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SourceError(f"{what} is {value}; numbers must be finite, and no value is an empty cell (or null)")
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError) as e:
        raise SourceError(f"{what} holds half a character (a lone surrogate) or is nested too deep") from e


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
        raise SourceError(f"{where}: start and end must be seconds, given {shown(start)} and {shown(end)}") from e
    if interval[0] >= interval[1]:
        raise SourceError(f"{where}: start {start} is not before end {end}")
    return interval


# -- the three kinds of files ----------------------------------------------------------------------------------------


def _read(source: str, name: str) -> tuple[list[str], _Rows]:
    """Names of the columns, and the rows."""
    suffix = PurePosixPath(source).suffix.lower()
    try:
        data = _read_bytes(source)
        if suffix == ".parquet":
            return _parquet(data)
        text = data.decode("utf-8-sig")
        if suffix in (".csv", ".tsv"):
            return _csv(text, "," if suffix == ".csv" else "\t", name)
        return _jsonl(text, name)
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise SourceError(f"{name} line {line}: the text is not UTF-8; save it as UTF-8") from e
    except (pa.ArrowException, csv.Error, OSError) as e:
        raise SourceError(f"cannot read {name}: {' '.join(str(e).split())[:200]}") from e


def _read_bytes(source: str) -> bytes:
    if "://" in source:
        import fsspec

        with fsspec.open(source, "rb") as f:
            return bytes(f.read())
    with open(source, "rb") as f:
        return f.read()


def _parquet(data: bytes) -> tuple[list[str], _Rows]:
    table = pyarrow.parquet.read_table(pa.BufferReader(data))
    rows = table.to_pylist() if len(set(table.column_names)) == table.num_columns else []
    return table.column_names, ((f"row {i}", {k: _told(v) for k, v in r.items()}) for i, r in enumerate(rows, 1))


def _told(value: Any) -> Any:
    """NaN says that there is no value, as in the tools that write such tables."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _jsonl(text: str, name: str) -> tuple[list[str], _Rows]:
    columns: dict[str, None] = {}
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = json.loads(line, parse_float=Decimal, parse_constant=float)
        except (ValueError, RecursionError) as e:
            raise SourceError(f"{name} {where}: no JSON ({getattr(e, 'msg', None) or type(e).__name__})") from e
        if not isinstance(row, dict):
            raise SourceError(f'{name} {where}: a row is an object like {{"uri": "a.mp4"}}, not {shown(row)}')
        columns |= dict.fromkeys(row)
        rows.append((where, {k: _told(v if k in _TIME_COLUMNS else _plain(v)) for k, v in row.items()}))
    return list(columns), rows


def _plain(value: Any) -> Any:
    """A JSON value with floats for decimals; a number that no float holds stays text."""
    if isinstance(value, Decimal):
        return float(value) if math.isfinite(float(value)) else str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _csv(text: str, delimiter: str, name: str) -> tuple[list[str], _Rows]:
    lines = _csv_lines(text, delimiter, name)
    _, columns = next(lines, (1, []))
    rows: list[tuple[str, list[str]]] = []
    for line, values in lines:
        if not values:
            continue
        where = f"line {line}, row {len(rows) + 1}"
        if len(values) != len(columns):
            raise SourceError(f"{name} {where}: {len(values)} values, but the header names {len(columns)} columns")
        rows.append((where, values))
    readers = [
        str if c in ("uri", *_TIME_COLUMNS) else _reader([v[i] for _, v in rows if v[i]]) for i, c in enumerate(columns)
    ]
    return columns, (
        (where, {c: read(v) if v else None for c, read, v in zip(columns, readers, values, strict=True)})
        for where, values in rows
    )


def _csv_lines(text: str, delimiter: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """The values of each row, and the line that it begins in."""
    usual = csv.field_size_limit(LONGEST_FIELD)  # of the whole process: it is put back
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for values in reader:
            yield line, values
            line = reader.line_num + 1
    except csv.Error as e:
        if "field limit" not in str(e):
            raise SourceError(f"cannot read {name} line {line}: {e}") from e
        field = _long_field(text, line, delimiter)
        raise SourceError(
            f"{name} line {line}: {field} is longer than {LONGEST_FIELD >> 20} MiB; if no quote is left open there, "
            "give such texts in Parquet or JSONL"
        ) from e
    finally:
        csv.field_size_limit(usual)


def _long_field(text: str, line: int, delimiter: str) -> str:
    """Which field of the row that begins in a line is too long, by its column."""
    csv.field_size_limit(len(text) + 1)
    columns = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    row = io.StringIO(text, newline="")
    for _ in range(line - 1):
        row.readline()
    values = next(csv.reader(row, delimiter=delimiter), [])
    at = next((i for i, value in enumerate(values) if len(value) > LONGEST_FIELD), -1)
    return f"column {columns[at]}" if 0 <= at < len(columns) and line > 1 else "a field"


def _reader(texts: list[str]) -> Callable[[str], Any]:
    """What a column's texts are: numbers or booleans where each of them is written just so, else text.

    ``007``, ``+1``, ``1.50`` and ``1e3`` are text: as numbers they would not come back as they were.
    """
    if not texts:
        return str
    if all(_INTEGER.fullmatch(t) and int(t) in INT64 for t in texts):
        return int
    if all(_is_float(t) for t in texts):
        return float
    if set(texts) <= {"true", "false"}:
        return lambda t: t == "true"
    return str


def _is_float(text: str) -> bool:
    if _INTEGER.fullmatch(text):
        return abs(int(text)) <= EXACT_IN_FLOAT
    try:
        return repr(float(text)) == text and math.isfinite(float(text))
    except ValueError:
        return False
