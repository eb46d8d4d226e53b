"""Reading and decoding payloads: byte ranges of whole groups of pictures, proved by their CRCs, decoded on threads.

Stages on the payload (tokenizers) read through here as trainers do. A JPEG payload is a frame cache of another rate and
size: its frames go to the same engines. An H.264 payload is decoded group by group, only those that hold a wanted
frame, one clip a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np

from videoflow.errors import BadSample, LoaderError
from videoflow.loader.buffers import BufferPool
from videoflow.loader.engine import check_clips
from videoflow.loader.engine_cpu import CpuEngine
from videoflow.loader.fit import fit_into, place
from videoflow.loader.reader import BlobRef, ClipReader, ClipRef, EncodedClip
from videoflow.media.picture import Geometry, Orientation, Picture
from videoflow.store.blobs import Record, iter_records
from videoflow.timeline import Grid, divisor_step

H264, JPEG = "h264", "jpeg"


@dataclass(frozen=True)
class PayloadRef(ClipRef):
    """Where a clip's payload lies. Indices are those of ``grid``, or, where ``by_position``, of its frames from 0.

    ``first_index``: the index of the first frame, where index − first_index is at least a frame's position, else None.
    """

    codec: str
    gop: int
    gop_offsets: tuple[int, ...]
    by_position: bool
    first_index: int | None

    def reaching(self, index: int) -> PayloadRef:
        """The same with no more bytes than up to the end of the group that holds an index."""
        if self.first_index is None:
            return self
        groups = min(len(self.gop_offsets) - 1, (index - self.first_index) // self.gop + 1)
        (ref,) = self.refs
        return replace(self, refs=(ref._replace(length=self.gop_offsets[groups]),))


def payload_ref(
    clip: Mapping[str, Any], payload: Mapping[str, Any], fps: Fraction | None
) -> tuple[PayloadRef, range] | None:
    """A clip's payload and the indices of its frames at a rate, None for its own; None if it does not have that rate.

    Args:
        clip: clip_key, t0_pts, t1_pts, tb_num, tb_den, start_pts. payload: as in `schemas.PAYLOAD_REF`.
    """
    time_base = Fraction(clip["tb_num"], clip["tb_den"])
    rate = Fraction(payload["fps_num"], payload["fps_den"])
    step, first_index = 1, int(payload["first_grid"])
    indices = range(first_index, first_index + payload["grid_count"])
    grid, by_position = Grid(clip["start_pts"], time_base, rate or Fraction(1)), not rate
    if rate and fps is not None:
        found = divisor_step(rate, fps)
        if found is None:
            return None
        step = found
    elif fps is not None:
        grid, by_position, first_index = Grid(clip["t0_pts"], time_base, fps), False, None  # type: ignore[assignment]
        indices = grid.indices(clip["t0_pts"], clip["t1_pts"])
    lies = BlobRef(*(int(payload[name]) for name in BlobRef._fields))
    offsets = tuple(payload["gop_offsets"])
    shape = (payload["height"], payload["width"], payload["codec"], payload["gop"], offsets)
    return PayloadRef(clip["clip_key"], (lies,), grid, *shape, by_position, first_index), indices[::step]


@dataclass(frozen=True)
class EncodedStream(EncodedClip):
    """Frames of one clip as H.264: ``packets`` in order, one a frame; frame t is that of packet ``positions[t]``."""

    packets: tuple[memoryview, ...]
    positions: tuple[int, ...]
    gop: int


class PayloadReader(ClipReader):
    """Reads the encoded frames of clips from the parts of a payload table; see `ClipReader`."""

    def read(
        self, clips: Sequence[ClipRef], wanted: Sequence[Sequence[int]], *, num_frames: int | None = None
    ) -> list[EncodedClip]:
        """As `ClipReader.read`, of `PayloadRef`s; H.264 as `EncodedStream`."""
        short = [
            c.reaching(max(w)) if isinstance(c, PayloadRef) and w else c for c, w in zip(clips, wanted, strict=True)
        ]
        return super().read(short, wanted, num_frames=num_frames)

    def _pick(self, clip: ClipRef, ranges: list[bytes], wanted: Sequence[int], num_frames: int | None) -> EncodedClip:
        assert isinstance(clip, PayloadRef)
        if clip.codec == JPEG and not clip.by_position:
            return super()._pick(clip, ranges, wanted, num_frames)
        try:
            records = [record for data in ranges for record in iter_records(data)]
        except BadSample as e:
            raise BadSample(f"clip {clip.clip_key}: payload: {e}") from e
        positions = self._positions(clip, records, wanted)
        num_padded = max(0, (num_frames or 0) - len(positions))
        positions += positions[-1:] * num_padded
        whole = EncodedClip(
            clip_key=clip.clip_key,
            pts=tuple(records[p].pts for p in positions),
            payloads=tuple(records[p].payload for p in positions),
            frame_valid=(True,) * (len(positions) - num_padded) + (False,) * num_padded,
            time_base=clip.grid.time_base,
            height=clip.height,
            width=clip.width,
        )
        if clip.codec == JPEG:
            return whole
        return EncodedStream(**vars(whole), packets=tuple(r.payload for r in records), positions=tuple(positions),
                             gop=clip.gop)  # fmt: skip

    @staticmethod
    def _positions(clip: PayloadRef, records: Sequence[Record], wanted: Sequence[int]) -> list[int]:
        found = list(wanted) if clip.by_position else clip.grid.frame_positions([r.pts for r in records], wanted)
        if not found or min(found) < 0 or max(found) >= len(records):
            raise BadSample(f"clip {clip.clip_key}: its payload of {len(records)} frames lacks some of those asked for")
        return found


class PayloadEngine:
    """Decodes payloads on the CPU; see ``DecodeEngine``. ``threads``: decoding threads."""

    name = "cpu"

    def __init__(self, *, threads: int = 2) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._buffers = BufferPool()
        self._jpeg = CpuEngine(threads=threads)

    def __repr__(self) -> str:
        return f"PayloadEngine(threads={self._threads})"

    def decode(self, clips: Sequence[EncodedClip], *, size: tuple[int, int] | None, fit: str) -> np.ndarray:
        """Pictures, uint8 (B, T, H, W, 3). Raises BadSample: a clip does not decode; it is named."""
        streams = [clip for clip in clips if isinstance(clip, EncodedStream)]
        if not streams:
            return self._jpeg.decode(clips, size=size, fit=fit)
        check_clips(clips, size)
        height, width = size or (clips[0].height, clips[0].width)
        out = self._buffers.take((len(clips), len(clips[0].payloads), height, width, 3))
        if self._threads == 1 or len(streams) == 1:
            for stream, pictures in zip(streams, out, strict=True):
                decode_stream(stream, pictures, size, fit)
            return out
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="videoflow-payload")
        list(self._pool.map(lambda pair: decode_stream(pair[0], pair[1], size, fit), zip(streams, out, strict=True)))
        return out

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._jpeg.close()
        self._buffers.clear()


def make_payload_engine(name: str, *, device: str | None = None, threads: int = 2) -> PayloadEngine:
    """The engine of H.264 payloads, whatever engine cached frames would go to; as `make_engine`."""
    if name == "dali":
        raise LoaderError("engine='dali' cannot decode an H.264 payload yet; leave it out, or take payload.codec: jpeg")
    return PayloadEngine(threads=threads)


def decode_stream(clip: EncodedStream, out: np.ndarray, size: tuple[int, int] | None, fit: str) -> None:
    """Decode a clip's frames into ``out``, uint8 (T, H, W, 3).

    Raises:
        BadSample: a packet does not decode, or gives no frame, or one of another size than the row says.
    """
    asked: dict[int, list[int]] = {}
    for t, position in enumerate(clip.positions):
        asked.setdefault(position, []).append(t)
    placement = place(clip.height, clip.width, size, fit)
    for position, picture in _pictures(clip, set(asked)):
        times = asked.pop(position)
        fit_into(picture, placement, out[times[0]])
        for t in times[1:]:
            out[t] = out[times[0]]
    if asked:
        raise BadSample(f"clip {clip.clip_key}: its payload gives no frame {min(asked)}")


def _pictures(clip: EncodedStream, asked: set[int]) -> Any:
    """(position, picture) of the frames asked for, of the groups that hold them."""
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.thread_count = 1
    last_of_group = {p // clip.gop: p for p in sorted(asked)}
    try:
        for group, last in sorted(last_of_group.items()):
            for position in range(group * clip.gop, last + 1):
                data: Any = clip.packets[position]
                packet = av.Packet(data)
                packet.pts = position
                for frame in decoder.decode(packet):
                    if frame.pts in asked:
                        yield frame.pts, _cropped(clip, frame)
        for frame in decoder.decode(None):
            if frame.pts in asked:
                yield frame.pts, _cropped(clip, frame)
    except (av.error.FFmpegError, ValueError) as e:
        raise BadSample(f"clip {clip.clip_key}: its payload does not decode: {e}") from e


def _cropped(clip: EncodedStream, frame: Any) -> np.ndarray:
    """RGB of a frame without the row and column that made its sides even."""
    if (frame.width - clip.width, frame.height - clip.height) not in ((0, 0), (0, 1), (1, 0), (1, 1)):
        told = f"its payload is {frame.height}×{frame.width}, its row says {clip.height}×{clip.width}"
        raise BadSample(f"clip {clip.clip_key}: {told}")
    whole = Picture(frame, Geometry(frame.width, frame.height, Fraction(1), Orientation())).rgb(
        frame.width, frame.height
    )
    return whole[: clip.height, : clip.width]
