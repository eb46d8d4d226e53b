"""From files to contents: every file's key, without reading a file twice whose stamp has not changed.

A local file is hashed where it lies; a remote one is streamed once through the hash. A file that cannot be read is
accounted for under a key of its own (made of its uri), as an ``io_error`` of stage ``sources``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from blake3 import blake3

from videoflow.dataset.catalog import Catalog, KnownSource
from videoflow.keys import KEY_CHARS, digest, digest_file
from videoflow.persist import HostWatch, persist
from videoflow.plan import VideoSource
from videoflow.sources import Scan, SourceFile, filesystem
from videoflow.store.ledger import QUARANTINED, ItemResult

SOURCES_STAGE = "sources"
_HASH_THREADS = 4
_BLOCK = 8 << 20
Interval = tuple[Fraction, Fraction]


@dataclass(frozen=True)
class Identified:
    """The distinct contents of a scan.

    Attributes:
        videos: readable contents, by key. unreadable: (uri, key, message) of files that cannot be read.
        changed: uris whose content is another than last time. vanished: known uris below the sources that are gone.
        duplicates: how many files hold the bytes of another one. differing: those whose metadata say something else.
    """

    videos: tuple[VideoSource, ...]
    unreadable: tuple[tuple[str, str, str], ...]
    changed: tuple[str, ...]
    vanished: tuple[str, ...]
    duplicates: int
    differing: tuple[str, ...] = ()


def identify(
    catalog: Catalog, scan: Scan, *, job: str | None, on_file: Callable[[], None] = lambda: None
) -> Identified:
    """Key every file; with ``job`` set, write what is new to the sources table (a plan writes nothing)."""
    known = catalog.known_sources()
    keyed: list[tuple[SourceFile, str]] = []
    unreadable: list[tuple[str, str, str]] = []
    hosts = HostWatch()
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        keys = [_known_key(f, known) for f in scan.files]
        new = pool.map(lambda f: _key(f, hosts), [f for f, k in zip(scan.files, keys, strict=True) if k is None])
        for file, key in zip(scan.files, (k if k is not None else next(new) for k in keys), strict=True):
            on_file()
            if key.startswith("!"):
                unreadable.append((file.uri, digest("unreadable", file.uri), key[1:]))
            else:
                keyed.append((file, key))
    changed = tuple(f.uri for f, k in keyed if f.uri in known and known[f.uri].video_key != k)
    there = {f.uri for f in scan.files}
    unlisted = tuple(f.uri for f in scan.files if f.problem and f.uri.endswith(os.sep))
    vanished = tuple(
        u for u in sorted(known) if u not in there and u.startswith(scan.prefixes) and not u.startswith(unlisted)
    )
    if job is not None:
        _record(catalog, keyed, unreadable, known, job)
    videos = _distinct(keyed)
    twice = len(keyed) - len(videos)
    return Identified(videos, tuple(unreadable), changed, vanished, twice, _differing(keyed, videos) if twice else ())


def _known_key(file: SourceFile, known: dict[str, KnownSource]) -> str | None:
    """The key of a file that cannot be read, or has not changed; None for one that is to be hashed."""
    if file.problem:
        return f"!{file.problem}"
    row = known.get(file.uri)
    if row and file.stamp and (row.stamp, row.size) == (file.stamp, file.size):
        return row.video_key
    return None


def _key(file: SourceFile, hosts: HostWatch) -> str:
    """The content's key, or "!" and why the file cannot be read."""
    try:
        key = persist(lambda: digest_file(file.path) if file.is_local else _digest_remote(file.path))
    except OSError as e:
        hosts.failed(file.path, e)
        return f"!cannot read the file: {e.strerror or e}"
    hosts.ok(file.path)
    return key


def _digest_remote(url: str) -> str:
    fs, path = filesystem(url)
    hasher = blake3()
    with fs.open(path, "rb", block_size=_BLOCK) as f:
        while block := f.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()[:KEY_CHARS]


def _record(
    catalog: Catalog,
    keyed: Iterable[tuple[SourceFile, str]],
    unreadable: Iterable[tuple[str, str, str]],
    known: dict[str, KnownSource],
    job: str,
) -> None:
    rows = []
    for file, key in keyed:
        metadata = _stored(file)
        old = known.get(file.uri)
        if not old or (old.stamp, old.video_key, old.metadata) != (file.stamp, key, metadata):
            rows.append(
                {"uri": file.uri, "size": file.size, "stamp": file.stamp, "video_key": key, "metadata": metadata}
            )
    lost = [(uri, key, why) for uri, key, why in unreadable if uri not in known or known[uri].video_key != key]
    rows += [{"uri": uri, "size": 0, "stamp": "", "video_key": key, "metadata": "{}"} for uri, key, _ in lost]
    catalog.add_sources(rows, job=job)
    entries = [
        (SOURCES_STAGE, "", "", ItemResult(key, key, "", state=QUARANTINED, reason="io_error", message=why))
        for _, key, why in lost
    ]
    catalog.ledger.append(entries, job=job)


#: Key of the intervals among the stored metadata; no column of a manifest can have such a name.
_INTERVALS = "_intervals"


def _stored(file: SourceFile) -> str:
    """What the sources table keeps of a manifest's rows, as JSON: the metadata, and the intervals if there are any,
    each with its own metadata. Older catalogs have intervals without; what they say of the video counts for each.
    """
    each = [
        [str(a), str(b), *([m] if m else [])] for (a, b), m in zip(file.intervals, file.interval_metadata, strict=True)
    ]
    asked = {_INTERVALS: each} if each else {}
    return json.dumps(file.metadata | asked, sort_keys=True, default=str)


def stored_intervals(rows: Iterable[KnownSource]) -> dict[Interval, dict[str, Any]]:
    """The intervals that manifests asked for of one content and what they said of each, from its rows of the sources
    table: as a run adds them up, by uri.
    """
    found: dict[Interval, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: r.uri):
        each = json.loads(row.metadata or "{}").get(_INTERVALS, ())
        _add_up(found, (((Fraction(a), Fraction(b)), dict(*told)) for a, b, *told in each))
    return found


def _add_up(found: dict[Interval, dict[str, Any]], more: Iterable[tuple[Interval, Mapping[str, Any]]]) -> None:
    """Intervals of another name of a content: what was said before counts."""
    for interval, told in more:
        found[interval] = {**told, **found.get(interval, {})}


def stored_metadata(rows: Iterable[KnownSource]) -> dict[str, Any]:
    """What manifests said of one content: of several names, the first one's word counts, as in a run."""
    found: dict[str, Any] = {}
    for row in sorted(rows, key=lambda r: r.uri):
        found = {**json.loads(row.metadata or "{}"), **found}
    return {name: value for name, value in found.items() if name != _INTERVALS}


def _distinct(keyed: Iterable[tuple[SourceFile, str]]) -> tuple[VideoSource, ...]:
    """One video a content: the first uri names it and its word counts; intervals of all its names add up."""
    named: dict[str, list[SourceFile]] = {}
    for file, key in sorted(keyed, key=lambda pair: pair[0].uri):
        named.setdefault(key, []).append(file)
    return tuple(_video(key, named[key]) for key in sorted(named))


def _video(key: str, files: Sequence[SourceFile]) -> VideoSource:
    first, metadata, each = files[0], dict[str, Any](), dict[Interval, dict[str, Any]]()
    for file in files:
        metadata = {**file.metadata, **metadata}
        _add_up(each, zip(file.intervals, file.interval_metadata, strict=True))
    intervals, told = tuple(each), tuple(each.values())
    return VideoSource(key, first.path, first.uri, first.size, first.stamp, metadata, intervals, told)


def _differing(keyed: Iterable[tuple[SourceFile, str]], videos: Iterable[VideoSource]) -> tuple[str, ...]:
    """Names of contents that say something else of the video, or of an interval, than the name that counts."""
    by_key, found = {v.video_key: v for v in videos}, []
    for file, key in keyed:
        v = by_key[key]
        each = dict(zip(v.intervals, v.interval_metadata, strict=True))
        pairs = [(file.metadata, v.metadata)]
        pairs += [(m, each[i]) for i, m in zip(file.intervals, file.interval_metadata, strict=True)]
        if any(counts[name] != value for said, counts in pairs for name, value in said.items()):
            found.append(file.uri)
    return tuple(sorted(found))
