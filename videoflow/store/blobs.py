"""The frame record: how pictures lie inside a chunk's blob, so that any byte range explains and proves itself.

A blob is a row of records, each ``<IqI`` (little endian: payload length uint32, pts int64, crc32 uint32 over the pts' 8
bytes and the payload) followed by the payload (an encoded picture). A reader who has the byte range of one or more
whole records needs nothing else.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from videoflow.errors import BadSample

HEADER = struct.Struct("<IqI")
_PTS = struct.Struct("<q")


class Record(NamedTuple):
    """One picture of a chunk: ``pts`` in the stream's time base, ``payload`` a view of the encoded bytes."""

    pts: int
    payload: memoryview


def checksum(pts: int, payload: bytes | memoryview) -> int:
    """crc32 over the pts (8 bytes, little endian) and the payload."""
    return zlib.crc32(payload, zlib.crc32(_PTS.pack(pts)))


def pack_record(pts: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), pts, checksum(pts, payload)) + payload


def pack_records(frames: Iterable[tuple[int, bytes]]) -> tuple[bytes, list[int]]:
    """Blob of (pts, encoded bytes) pairs, and the offsets of its records: n + 1 numbers, the last is the length."""
    out = bytearray()
    offsets = [0]
    for pts, payload in frames:
        out += pack_record(pts, payload)
        offsets.append(len(out))
    return bytes(out), offsets


def proved(data: bytes) -> dict[str, Any]:
    """The columns of an array's bytes and what proves them."""
    return {"data": data, "crc": zlib.crc32(data)}


def iter_records(data: bytes | memoryview, *, verify: bool = True) -> Iterator[Record]:
    """Records of a byte range of whole records.

    Raises:
        BadSample: the range ends inside a record, or a record fails its CRC (with its pts and offset).
    """
    view = memoryview(data)
    at = 0
    while at < len(view):
        if at + HEADER.size > len(view):
            raise BadSample(
                f"frame record at byte {at} is cut off: {len(view) - at} bytes left, the header needs {HEADER.size}"
            )
        length, pts, crc = HEADER.unpack_from(view, at)
        payload = view[at + HEADER.size : at + HEADER.size + length]
        if len(payload) < length:
            raise BadSample(f"frame record at byte {at} (pts {pts}) is cut off: {len(payload)} of {length} bytes")
        if verify and checksum(pts, payload) != crc:
            raise BadSample(f"frame record at byte {at} (pts {pts}) fails its CRC")
        yield Record(pts, payload)
        at += HEADER.size + length
