"""Opening a media file: the stream videoflow takes from it, and a class of its own for every way it can be unusable.

Containers are opened with FFmpeg through PyAV. "Best" streams differ between libraries, so the choice is ours: the
first video stream that is no cover picture, unless the recipe picks one by its container index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import av.error
from av.codec.hwaccel import HWAccel

from videoflow.errors import MediaError

#: FFmpeg's AV_DISPOSITION_ATTACHED_PIC: a cover picture, no video.
COVER_PICTURE = 0x400
HEAD_BYTES = 4096
_TS_PACKET = 188
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"moof", b"styp", b"sidx")


def sniff(head: bytes) -> str | None:
    """Name of the container family whose signature the first bytes carry, None if none is known."""
    if head[4:8] in _BOXES:
        return "mp4"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:11] == b"AVI":
        return "avi"
    for magic, name in ((b"FLV", "flv"), (b"OggS", "ogg"), (b"GIF8", "gif"), (b"\x00\x00\x01\xba", "mpeg")):
        if head.startswith(magic):
            return name
    if head.startswith(b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"):
        return "asf"
    for start in (0, 4):  # plain TS, and M2TS with its 4-byte time codes
        stride = _TS_PACKET + start
        syncs = head[start::stride][:4]
        if len(syncs) >= 3 and set(syncs) == {0x47}:
            return "mpegts"
    return None


def _why_unopenable(path: Path, error: Exception) -> MediaError:
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            head = f.read(HEAD_BYTES)
    except OSError as e:
        return MediaError("io_error", f"cannot read the file: {e.strerror or e}")
    if size == 0:
        return MediaError("empty", "the file is empty (0 bytes)")
    family = sniff(head)
    if family == "mp4":
        has_index = _has_top_level_moov(path)
        lost = (
            "its index (moov) is damaged"
            if has_index
            else "no index (moov): unfinished upload, or a broken box hides it"
        )
        return MediaError("header_damaged", f"mp4/mov file that cannot be opened: {lost}")
    if family:
        return MediaError("header_damaged", f"{family} file whose header cannot be read: {_text(error)}")
    return MediaError("not_video", f"no media file: FFmpeg knows no format for its first bytes {head[:8]!r}")


def _has_top_level_moov(path: Path) -> bool:
    """Walk the top-level boxes of an ISO file; False when the walk meets no ``moov``."""
    size = path.stat().st_size
    with path.open("rb") as f:
        at = 0
        while at + 8 <= size:
            f.seek(at)
            header = f.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if kind == b"moov":
                return True
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            if length < 8:
                return False
            at += length
    return False


def _text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0][:200]


@contextmanager
def open_media(path: str | Path, hwaccel: HWAccel | None = None) -> Iterator[av.container.InputContainer]:
    """Open a local media file; ``hwaccel``: what decodes its streams, None for the CPU.

    Raises:
        MediaError: ``empty``, ``not_video``, ``header_damaged`` or ``io_error``.
    """
    path = Path(path)
    try:
        # "file:" keeps FFmpeg from reading a name such as `a:b.mp4` as a protocol.
        container = av.open(f"file:{path}", mode="r", metadata_errors="replace", hwaccel=hwaccel)
    except av.error.FFmpegError as e:
        raise _why_unopenable(path, e) from e
    except OSError as e:
        raise MediaError("io_error", f"cannot read the file: {_text(e)}") from e
    try:
        yield container
    finally:
        container.close()


def choose_stream(container: av.container.InputContainer, index: int | None = None) -> Any:
    """The video stream to decode: container index ``index``, or the first that is no cover picture.

    Raises:
        MediaError: ``no_video_stream``, ``codec_unsupported`` or ``encrypted``.
    """
    videos = [s for s in container.streams.video if not int(s.disposition) & COVER_PICTURE]
    if index is not None:
        videos = [s for s in videos if s.index == index]
    if not videos:
        kinds = ", ".join(f"{s.index}: {s.type}" for s in container.streams) or "none"
        wanted = "no video stream" if index is None else f"no video stream with index {index}"
        raise MediaError("no_video_stream", f"{wanted} in the file (streams: {kinds})")
    stream = videos[0]
    tag = str(getattr(stream.codec_context, "codec_tag", "") or "").lower()
    if "encv" in tag or "drm" in tag:
        raise MediaError("encrypted", f"stream {stream.index} is encrypted (sample entry {tag})")
    context = stream.codec_context
    if context is None or not _has_decoder(context):
        name = getattr(context, "name", None) or tag or "unknown codec"
        raise MediaError("codec_unsupported", f"stream {stream.index}: this FFmpeg has no decoder for {name}")
    return stream


def _has_decoder(context: Any) -> bool:
    try:
        return bool(context.codec is not None and context.is_decoder)
    except (av.error.FFmpegError, ValueError, AttributeError):
        return False
