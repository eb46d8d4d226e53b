"""Which of a version's two stores of frames a loader reads: the frame cache, or the payload of chosen clips.

A payload has its own grid and size, so its rows are the version's rows with the grid, size and references of the
payload in place of the cache's; sampling, batches and state know no difference. A payload at the source's own rate
(``fps: native``) has every shown frame of its clips: without ``fps`` its frames are taken one by one, with ``fps``
frame k is the last one shown at t0 + k / fps, for any rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from videoflow.errors import LoaderError
from videoflow.loader.fit import place
from videoflow.loader.payload import JPEG, PayloadRef
from videoflow.loader.reader import BlobRef, ClipRef, VersionSource
from videoflow.loader.rows import VersionRows, load_table, open_version
from videoflow.loader.sampling import parse_fps
from videoflow.loader.sound import SoundRows
from videoflow.loader.state import LoaderConfig
from videoflow.store import schemas
from videoflow.timeline import divisor_step

FRAMES, PAYLOAD = "frames", "payload"
#: Columns of the version that a payload needs besides those of the frame cache.
_MORE = ("t0_pts", "t1_pts", PAYLOAD)


class PayloadRows(VersionRows):
    """The chosen rows of a version, read from the payload. ``codec``: h264 or jpeg, of all of them."""

    def __init__(self, table: pa.Table, columns: Sequence[str], fps: Fraction | None, *, audio: bool = False) -> None:
        table = table.take(pa.array(np.argsort(table["position"].to_numpy(), kind="stable")))
        payload = table[PAYLOAD].combine_chunks()
        super().__init__(_with_payload_grid(table, fps), columns)
        self.sound = SoundRows(table) if audio else None
        self._payload = payload
        self._is_native = np.asarray(pc.equal(payload.field("fps_num"), 0), bool)
        self._fps = fps
        if audio and fps is None and self._is_native.any():
            raise LoaderError(
                "audio=True: frames of a payload at the source's own rate are taken one by one, whatever lies between "
                "them; give fps= for frames at even times and the sound that goes with them"
            )
        codecs = pc.unique(payload.field("codec")).to_pylist()
        self.codec: str = codecs[0] if len(codecs) == 1 else "h264"

    def _clip_ref(self, row: int, key: str) -> ClipRef:
        clip, native = super()._clip_ref(row, key), bool(self._is_native[row])
        told = {name: self._payload.field(name)[row].as_py() for name in ("codec", "gop", "gop_offsets")}
        by_position = native and self._fps is None
        first = None if native and not by_position else int(self.ints["first_grid"][row])
        return PayloadRef(**vars(clip), **{**told, "gop_offsets": tuple(told["gop_offsets"])}, by_position=by_position,
                          first_index=first)  # fmt: skip


def _with_payload_grid(table: pa.Table, fps: Fraction | None) -> pa.Table:
    """Rows with the payload's size, grid and place in the columns of the frame cache's."""
    payload = table[PAYLOAD].combine_chunks()
    ints = {n: payload.field(n).to_pylist() for n in ("fps_num", "fps_den", "first_grid", "grid_count", "n")}
    times = {n: table[n].to_pylist() for n in ("t0_pts", "t1_pts", "tb_num", "tb_den", "start_pts")}
    columns: dict[str, list[int]] = {
        n: [] for n in ("start_pts", "cache_fps_num", "cache_fps_den", "first_grid", "grid_count")
    }
    for i in range(len(table)):
        own, at = {n: v[i] for n, v in ints.items()}, {n: v[i] for n, v in times.items()}
        start, first, count, rate = (
            at["start_pts"],
            own["first_grid"],
            own["grid_count"],
            (own["fps_num"], own["fps_den"]),
        )
        if not own["fps_num"]:
            start, first, count, rate = at["t0_pts"], 0, own["n"], (1, 1)
            if fps is not None:
                rate = (fps.numerator, fps.denominator)
                per = at["tb_den"] * rate[1]
                count = -((at["t0_pts"] - at["t1_pts"]) * at["tb_num"] * rate[0] // per)
        for name, value in zip(columns, (start, *rate, first, count), strict=True):
            columns[name].append(value)
    arrays: dict[str, pa.Array] = {n: pa.array(v, pa.int64()) for n, v in columns.items()}
    arrays |= {n: payload.field(n) for n in ("width", "height")}
    places = pa.StructArray.from_arrays([payload.field(n) for n in BlobRef._fields], BlobRef._fields)
    places = places.cast(schemas.BLOB_REF)
    arrays["frames"] = pa.ListArray.from_arrays(pa.array(range(len(table) + 1), pa.int32()), places)
    for name, array in arrays.items():
        table = table.set_column(table.column_names.index(name), name, array)
    return table


def choose_rows(version: VersionSource, config: LoaderConfig) -> tuple[VersionRows, str]:
    """The rows a loader takes, and where their frames are read: ``frames`` or ``payload``.

    ``auto`` takes the payload where the asked rate does not divide the cache's but fits the payload, or where the asked
    size would enlarge a cached picture and every clip has a payload that is larger.

    Raises:
        LoaderError: the payload is asked for, or needed for the rate, and some clips have none.
    """
    has = bool(version.tables.get(PAYLOAD)) and PAYLOAD in open_version(version).schema.names
    if config.source == PAYLOAD and not has:
        raise LoaderError(
            f"source='payload': version {version.id} has no payload; add the payload stage to the recipe and publish a "
            "new version"
        )
    more = _MORE if has and config.source != FRAMES else ()
    columns, audio = config.columns, config.audio
    table = load_table(version, split=config.split, where=config.filter, columns=columns, audio=audio, more=more)
    if not more:
        return VersionRows(table, columns, audio=audio), FRAMES
    fps = parse_fps(config.fps)
    needs = "is asked for" if config.source == PAYLOAD else _rate_need(table, fps)
    missing = table[PAYLOAD].null_count
    if needs and missing:
        raise LoaderError(
            f"the payload {needs}, but {missing} of {len(table)} clips have none; leave them out with filter='payload "
            "IS NOT NULL', or choose more clips (payload.where, payload.count) and publish a new version"
        )
    if needs or (not missing and _size_need(table, config)):
        return PayloadRows(table, columns, fps, audio=audio), PAYLOAD
    return VersionRows(table, columns, audio=audio), FRAMES


def _rate_need(table: pa.Table, fps: Fraction | None) -> str:
    """Why the rate needs the payload; empty where it does not, or where the payload does not have it either."""
    payload = pc.drop_null(table[PAYLOAD].combine_chunks())
    if fps is None or not len(payload):
        return ""
    cached = _rates(table["cache_fps_num"], table["cache_fps_den"])
    kept = _rates(payload.field("fps_num"), payload.field("fps_den"))
    if all(divisor_step(rate, fps) for rate in cached) or not all(not r or divisor_step(r, fps) for r in kept):
        return ""
    return f"is needed for fps={fps} (the frame cache has {', '.join(map(str, sorted(cached)))})"


def _rates(nums: Any, dens: Any) -> set[Fraction]:
    return {Fraction(n, d) for n, d in set(zip(nums.to_pylist(), dens.to_pylist(), strict=True))}


def _size_need(table: pa.Table, config: LoaderConfig) -> bool:
    """True if the asked size would enlarge some cached picture whose payload is larger."""
    if config.size is None:
        return False
    payload = table[PAYLOAD].combine_chunks()
    pairs = zip(
        *(table[n].to_pylist() for n in ("height", "width")),
        *(payload.field(n).to_pylist() for n in ("height", "width")),
        strict=True,
    )
    return any(
        kept_h > h and place(h, w, config.size, config.fit).enlarges for h, w, kept_h, kept_w in set(pairs) if kept_w
    )


def engine_name(rows: VersionRows) -> str:
    """What decodes these rows' frames: ``jpeg`` for all engines, ``h264``."""
    return rows.codec if isinstance(rows, PayloadRows) else JPEG
