"""Where videos come from: folders, globs, URLs and manifests become a list of files, before any of them is opened.

A folder is walked to its bottom. A file is a video by its extension, or by its first bytes where the extension is
unknown or missing; everything else is *ignored* and counted, not quarantined. A manifest (Parquet, CSV, TSV, JSONL)
names files in a column ``uri``; rows with ``start`` and ``end`` (seconds of stream time) become clips of their own; all
other columns travel along as metadata, of the row's interval where it has one, else of the whole video. Rows that say
different things of the same are refused: whichever won, somebody would train on a pair that nobody wrote down.
"""

from __future__ import annotations

import glob as local_glob
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from videoflow.errors import MissingExtra, SourceError, SystemFailure, shown
from videoflow.manifest import MANIFEST_EXTENSIONS, ManifestRow, read_manifest
from videoflow.media.container import HEAD_BYTES, sniff
from videoflow.persist import fsspec_options, persist, storage_failure
from videoflow.store.layout import CATALOG_FILE, LEDGER, is_own, is_own_object

VIDEO_EXTENSIONS = frozenset(
    ".mp4 .m4v .mov .qt .mkv .webm .avi .flv .f4v .wmv .asf .mpg .mpeg .mpe .m2v .m2ts .mts .ts .vob .ogv .ogm .ogg "
    ".3gp .3g2 .mxf .gif .divx .y4m .h264 .264 .h265 .265 .hevc .vvc .266 .av1 .ivf .rm .rmvb .dv .mj2 .nut".split()
)
#: Files that lie beside videos and are none, whatever their first bytes say.
SIDECAR_EXTENSIONS = frozenset(
    ".txt .md .json .jsonl .ndjson .yaml .yml .toml .xml .csv .tsv .parquet .html .htm .srt .vtt .ass .ssa .sub .idx "
    ".nfo .jpg .jpeg .png .webp .bmp .tif .tiff .npy .npz .pt .pkl .wav .mp3 .flac .m4a .aac .opus .pdf .log .py .sh "
    ".zip .tar .gz .bz2 .xz .7z .part .tmp .crdownload .md5 .sha1 .sha256 .ds_store .ini .db".split()
)
NO_VIDEO = "no video"
_KINDS = {"pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
#: Extensions that mean something else just as often: their first bytes decide.
AMBIGUOUS_EXTENSIONS = frozenset({".ts", ".ogg", ".dv", ".sub"})
_CLEARLY_VIDEO, _CLEARLY_SIDECAR = VIDEO_EXTENSIONS - AMBIGUOUS_EXTENSIONS, SIDECAR_EXTENSIONS - AMBIGUOUS_EXTENSIONS


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that is to be a video.

    Attributes:
        uri: printable name without credentials or query; an absolute path for local files.
        path: what opens it (local path, or URL for fsspec). Not printed, not stored.
        size: bytes. stamp: etag, else modification time: equal stamps mean unchanged content.
        metadata: the manifest's other columns, of rows without an interval. intervals: (start, end) seconds asked for,
            in the manifest's order. interval_metadata: the other columns of each interval's row.
        problem: why it cannot be read, None if it can. where: the manifest's row that names it, for messages.
    """

    uri: str
    path: str = field(repr=False)
    size: int = 0
    stamp: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    intervals: tuple[tuple[Fraction, Fraction], ...] = ()
    interval_metadata: tuple[dict[str, Any], ...] = ()
    problem: str | None = None
    where: str = field(default="", compare=False)

    @property
    def is_local(self) -> bool:
        return "://" not in self.path


@dataclass(frozen=True)
class Scan:
    """What the sources hold: ``files`` by uri, without doubles; ``ignored`` names what is no video."""

    files: tuple[SourceFile, ...]
    ignored: tuple[str, ...]
    ignored_why: dict[str, int]  # how many of them by reason: no video, pipe, socket, device
    prefixes: tuple[str, ...]  # folders that were walked: known sources below them that are gone have vanished


def scan(sources: Iterable[str]) -> Scan:
    """List all sources.

    Raises:
        SourceError: a source that is not there, or a manifest that cannot be read (with its row).
        SystemFailure: storage that cannot be listed.
    """
    named: dict[str, list[SourceFile]] = {}
    ignored: dict[str, str] = {}
    prefixes: list[str] = []
    for source in sources:
        before = len(ignored)
        found = list(_scan_one(source, ignored, prefixes))
        if not found and len(ignored) == before:
            raise SourceError(f"source {printable(source)} holds no files")
        for f in found:
            named.setdefault(f.uri, []).append(f)
    files = {uri: _merged(found) for uri, found in named.items()}
    left = {path: why for path, why in ignored.items() if path not in files}
    reasons = dict(sorted(Counter(left.values()).items()))
    return Scan(tuple(files[u] for u in sorted(files)), tuple(sorted(left)), reasons, tuple(prefixes))


def _merged(named: Sequence[SourceFile]) -> SourceFile:
    """One file from all rows and sources that name it: intervals add up, and each keeps what its own rows say.

    Raises:
        SourceError: two rows give one column of the same interval, or of the whole video, different values.
    """
    if len(named) == 1:
        return named[0]
    said: dict[tuple[Fraction, Fraction] | None, dict[str, tuple[Any, str]]] = {}
    for f in named:
        interval = f.intervals[0] if f.intervals else None
        columns = said.setdefault(interval, {})
        for column, value in (f.interval_metadata[0] if f.intervals else f.metadata).items():
            first, where = columns.setdefault(column, (value, f.where))
            if first != value:
                raise _contradiction(f, column, interval, (shown(first), where), (shown(value), f.where))
    told = {i: {column: value for column, (value, _) in columns.items()} for i, columns in said.items()}
    whole = told.pop(None, {})
    intervals = tuple(i for i in told if i is not None)
    return replace(
        named[0], metadata=whole, intervals=intervals, interval_metadata=tuple(told[i] for i in intervals), where=""
    )


def _contradiction(
    file: SourceFile, column: str, interval: tuple[Fraction, Fraction] | None, *said: tuple[str, str]
) -> SourceError:
    of = "" if interval is None else f" from {float(interval[0]):g} to {float(interval[1]):g} s"
    values = " and ".join(f"{value} ({where})" for value, where in said)
    how = "give each row its own start and end, or" if interval is None else "give the rows different intervals, or"
    return SourceError(
        f"{file.uri}{of}: rows give {column} different values, {values}; {how} write one row with all values, "
        "as columns of their own or as a list (JSONL, Parquet)"
    )


def _scan_one(source: str, ignored: dict[str, str], prefixes: list[str]) -> Iterator[SourceFile]:
    if "://" in source and not source.startswith("file://"):
        yield from _scan_remote(source, ignored, prefixes)
        return
    path = os.path.abspath(os.path.expanduser(source.removeprefix("file://")))
    if os.path.isdir(path):
        prefixes.append(printable(path) + os.sep)
        yield from _folder(path, ignored)
    elif os.path.isfile(path):
        if Path(path).suffix.lower() in MANIFEST_EXTENSIONS:
            yield from _from_manifest(path)
        else:
            yield _local_file(path)
    elif any(c in source for c in "*?["):
        matches = sorted(local_glob.glob(path, recursive=True))
        if not matches:
            raise SourceError(f"source {printable(source)}: no file matches")
        for match in matches:
            if os.path.isdir(match):
                yield from _folder(match, ignored)
            else:
                yield from _screen([match], ignored)
    elif os.path.exists(path):
        raise SourceError(f"source {printable(source)} is a {_kind(path)}, not a folder, file, glob, URL or manifest")
    else:
        raise SourceError(f"source {printable(source)} does not exist (a folder, file, glob, URL or manifest)")


def _folder(folder: str, ignored: dict[str, str]) -> Iterator[SourceFile]:
    """Videos below a folder; a folder inside it that cannot be listed is one source that cannot be read."""
    unlisted: dict[str, str] = {}
    yield from _screen(_walk(folder, unlisted), ignored)
    for path, why in unlisted.items():
        yield SourceFile(printable(path) + os.sep, path, problem=f"cannot list the folder: {why}")


def _walk(folder: str, unlisted: dict[str, str]) -> Iterator[str]:
    """Files below a folder, sorted; links are followed once, hidden names and a catalog's own files are left out.
    ``unlisted`` takes folders inside it that cannot be listed, and why.
    """
    seen: set[tuple[int, int]] = set()
    stack = [folder]
    while stack:
        here = stack.pop()
        try:
            info = os.stat(here)
            entries = sorted(os.scandir(here), key=lambda e: e.name)
        except OSError as e:
            if here == folder:
                raise SystemFailure(f"cannot list {printable(here)}: {e.strerror}") from e
            unlisted[here] = str(e.strerror)
            continue
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        is_catalog = {CATALOG_FILE, LEDGER} <= {e.name for e in entries}
        for entry in entries:
            if entry.name.startswith(".") or (is_catalog and is_own(here, entry.name)):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself
                is_folder = False
            if is_folder:
                stack.append(entry.path)
            else:
                yield entry.path


def _screen(paths: Iterable[str], ignored: dict[str, str]) -> Iterator[SourceFile]:
    """Local files of a folder or glob: videos go on, the others are ignored."""
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in _CLEARLY_VIDEO:
            yield _local_file(path)
        elif suffix in _CLEARLY_SIDECAR or sniff(_head(path)) is None:
            ignored[printable(path)] = _kind(path) or NO_VIDEO
        else:
            yield _local_file(path)


def _kind(path: str) -> str | None:
    """What stands at a path that is neither a file nor a folder, None for those."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return next((name for name, is_one in _KINDS.items() if is_one(mode)), "device")


def _head(path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            return b""
        with open(path, "rb") as f:
            return f.read(HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def _local_file(path: str, *, metadata: dict[str, Any] | None = None) -> SourceFile:
    uri = printable(path)
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return SourceFile(uri, path, metadata=metadata or {}, problem=f"a {_kind(path) or 'folder'}, not a file")
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
        return SourceFile(uri, path, metadata=metadata or {}, problem=f"cannot read the file: {why}")
    return SourceFile(uri, path, info.st_size, f"mtime:{info.st_mtime_ns}", metadata or {})


def _scan_remote(source: str, ignored: dict[str, str], prefixes: list[str]) -> Iterator[SourceFile]:
    fs, root = filesystem(source)
    shown = printable(source)
    try:
        if any(c in source for c in "*?["):
            found = persist(lambda: fs.glob(root, detail=True))
        elif persist(lambda: fs.isfile(root)):
            if Path(root).suffix.lower() in MANIFEST_EXTENSIONS:
                yield from _from_manifest(source)
                return
            found = {root: persist(lambda: fs.info(root))}
        else:
            found = persist(lambda: fs.find(root, detail=True))
            prefixes.append(shown.rstrip("/") + "/")
    except FileNotFoundError as e:
        raise SourceError(f"source {shown} does not exist") from e
    except OSError as e:
        raise storage_failure(f"cannot list {shown}", e) from e
    catalogs = {p.removesuffix(f"/{CATALOG_FILE}") for p in found if p.endswith(f"/{CATALOG_FILE}")}
    for path in sorted(found):
        if any(path.startswith(f"{c}/") and is_own_object(path[len(c) + 1 :]) for c in catalogs):
            continue
        info, url = found[path], fs.unstrip_protocol(path)
        if info.get("type") == "directory":
            continue
        suffix = Path(path).suffix.lower()
        known = suffix in _CLEARLY_VIDEO
        if not known and (suffix in _CLEARLY_SIDECAR or sniff(persist(partial(fs.head, path, HEAD_BYTES))) is None):
            ignored[printable(url)] = NO_VIDEO
            continue
        yield _remote_file(url, info)


def _remote_file(url: str, info: dict[str, Any]) -> SourceFile:
    stamp = info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("mtime") or info.get("created")
    return SourceFile(printable(url), url, int(info.get("size") or 0), f"remote:{stamp}" if stamp else "")


def _from_manifest(source: str) -> Iterator[SourceFile]:
    for row in read_manifest(source, name=printable(source)):
        told: dict[str, Any] = {"metadata": row.metadata}
        if row.interval:
            told = {"intervals": (row.interval,), "interval_metadata": (row.metadata,)}
        yield replace(_manifest_file(row), **told, where=row.where)


def _manifest_file(row: ManifestRow) -> SourceFile:
    if "://" not in row.location:
        return _local_file(row.location)
    fs, path = filesystem(row.location)
    try:
        return _remote_file(row.location, persist(lambda: fs.info(path)))
    except FileNotFoundError:
        return SourceFile(printable(row.location), row.location, problem="no such object")
    except OSError as e:
        return SourceFile(printable(row.location), row.location, problem=f"cannot be read: {type(e).__name__}")


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec file system and path of a URL.

    Raises:
        MissingExtra: the protocol's package is not installed. SourceError: unknown protocol.
    """
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url, **fsspec_options(url))
    except ImportError as e:
        protocol = url.split("://", 1)[0]
        raise MissingExtra(f"the fsspec driver for {protocol}://", needed_for=printable(url), extra="s3") from e
    except ValueError as e:
        raise SourceError(f"source {printable(url)}: {str(e).splitlines()[0]}") from e
    return fs, path


def printable(path: str) -> str:
    """A path or URL fit for tables and terminals: no credentials, no query, undecodable bytes as \\xNN."""
    if "://" in path:
        parts = urlsplit(path)
        path = urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[-1], parts.path, "", ""))
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
