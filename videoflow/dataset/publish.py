"""Publishing a version: its number is claimed by one conditional put, its rows are written, and another conditional put
of ``version.json`` makes it real. A publisher that dies in between leaves a number that is never used.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from videoflow.dataset.catalog import Catalog
from videoflow.dataset.version import Version
from videoflow.errors import SourceError, SystemFailure, shown
from videoflow.keys import digest
from videoflow.plan import VideoSource
from videoflow.recipe import BuiltStage
from videoflow.stage import VideoStage
from videoflow.store.layout import version_dir
from videoflow.store.schemas import ARRAY_REF, BLOB_REF, FORMAT_NUMBER, PAYLOAD_REF, ROW_REF, SOUND_REF
from videoflow.store.writer import write_new_table

#: Where bytes lie is no content: two equal versions may differ in columns of these types.
_PLACES = (pa.list_(BLOB_REF), pa.list_(SOUND_REF), ROW_REF, ARRAY_REF, PAYLOAD_REF)


def split_of(group: str, shares: dict[str, float]) -> str:
    """The split of a group (a video's key, or a user's column), by its hash; shares are exact."""
    point = Fraction(int(digest("split", group)[:16], 16), 1 << 64)
    edge = Fraction(0)
    names = [n for n, share in shares.items() if share > 0]
    for name in names:
        edge += Fraction(str(shares[name]))
        if point < edge:
            return name
    return names[-1]


def split_groups(videos: Iterable[VideoSource], by: str) -> dict[str, str]:
    """By video key, what decides its split: its key, or what the sources say of it in a column.

    Raises:
        SourceError: no source has the column, or its value differs between the intervals of one video: their frames may
            overlap, so all clips of a video belong to one split.
    """
    if by == "video":
        return {v.video_key: v.video_key for v in videos}
    groups, is_known = {}, False
    for v in videos:
        values = list({str(m.get(by)): m.get(by) for m in v.told}.values())
        if len(values) > 1:
            found = " and ".join("nothing" if value is None else shown(value) for value in values[:2])
            raise SourceError(
                f"split_by: {by!r} differs between the intervals of {v.uri} ({found}), and all clips of a video belong "
                "to one split; take a column that is the same in all of a video's rows, or split_by: video"
            )
        is_known |= values[0] is not None
        groups[v.video_key] = v.video_key if values[0] is None else str(values[0])
    if not is_known:
        raise SourceError(f"split_by: {by!r} is no column of these sources' metadata; without it splits would leak")
    return groups


def missing_words(stages: Iterable[BuiltStage], videos: Sequence[VideoSource]) -> list[str]:
    """What to say of videos about which the sources are silent in a column that a stage needs.

    Raises:
        SourceError: they are silent about all of them.
    """
    said = []
    for b in stages:
        assert isinstance(b.stage, VideoStage)
        for name in b.stage.metadata_columns():
            without = sum(all(not str(m.get(name) or "").strip() for m in v.told) for v in videos)
            if without == len(videos):
                there = sorted({k for v in videos for m in v.told for k in m})
                raise SourceError(
                    f"stages.{b.key}: {name!r} is no column of these sources, or empty in all of them (there are: "
                    f"{', '.join(there) or 'none; a manifest gives columns'})"
                )
            if without:
                said.append(f"{b.key}: {without} of {len(videos)} videos have nothing in the column {name}")
    return said


def content_digest(table: pa.Table, fingerprints: dict[str, str]) -> str:
    """Digest of a version's rows and of what computed them, without the places of bytes."""
    light = table.drop_columns(_places(table))
    if "payload" in table.column_names:  # which clips have one, and of what
        light = light.append_column("payload", pc.struct_field(table["payload"], "digest"))
    rows = [digest(_told(batch.to_pydict())) for batch in light.to_batches(max_chunksize=1000)]
    return digest("version", light.column_names, rows, fingerprints)


def _places(table: pa.Table) -> list[str]:
    return [f.name for f in table.schema if f.type in _PLACES]


def _told(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns as JSON can say them: a stage of a user's own may score NaN or an infinity."""
    return {
        name: [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]
        for name, values in columns.items()
    }


def publish(
    catalog: Catalog, name: str, table: pa.Table, *, manifest: dict[str, Any], fingerprints: dict[str, str]
) -> tuple[Version, bool]:
    """Publish a table of clips as the next version of a name; (version, whether it is new).

    If its content equals the name's newest version, that one is the answer and nothing is written.
    """
    content = content_digest(table, fingerprints)
    numbers = catalog.version_numbers(name)
    published = [v for v in catalog.versions(name) if v.number in numbers]
    if published and published[-1].digest == content:
        newest = catalog.version(published[-1].id)
        if newest.clips(columns=_places(table)).equals(table.select(_places(table))):
            return newest, False
        # Same content in other places: the cache was lost and made again, so the old references lead nowhere.
    root, number = catalog.root, (numbers[-1] if numbers else 0) + 1
    nonce = secrets.token_hex(8).encode()
    while not root.put_new(f"{version_dir(name, number)}/claim", nonce):
        number += 1
    full = {
        "format": FORMAT_NUMBER,
        "name": name,
        "number": number,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "clips": len(table),
        "videos": len(set(table["video_key"].to_pylist())),
        "digest": content,
        "fingerprints": fingerprints,
        **manifest,
    }
    write_new_table(root, f"{version_dir(name, number)}/clips.lance", table)
    if not root.put_new(f"{version_dir(name, number)}/version.json", json.dumps(full, indent=1).encode()):
        raise SystemFailure(f"{name}@{number} was published by somebody else meanwhile; run again")
    return Version(root, name, number, full), True
