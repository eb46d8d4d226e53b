"""The encoder of H.264 payloads: closed groups of a fixed number of frames, no reordering, one packet a frame.

Every keyframe is an IDR picture with its parameter sets before it, so any run of whole groups decodes on its own; and
packet i is frame i, so a packet can carry the pts of its source frame. 4:2:0, 8 bit, one thread: the same frames give
the same bytes. Planes that are 4:2:0 video already go in as they are, with their matrix and range as tags; all other
pictures go through RGB to BT.601, limited range, with odd sides made even by repeating the last row or column.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import av
import av.error
import cv2
import numpy as np
from av.video.reformatter import VideoReformatter

from videoflow.errors import MediaError, MissingExtra
from videoflow.keys import digest_bytes
from videoflow.media.picture import Geometry, Orientation, Picture, plane_array

Planes = tuple[np.ndarray, np.ndarray, np.ndarray]
Colour = tuple[int, bool]
#: What pictures that come through RGB are encoded as: BT.601 (SMPTE 170M), limited range.
BT601: Colour = (6, False)
#: swscale's numbers of matrices (SWS_CS_*) by AVColorSpace.
_SWS = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9, 10: 9}
_LIMITED, _FULL = 1, 2
#: Rate that rate control is told where frames have no rate of their own.
ASSUMED_RATE = Fraction(30)


class H264Encoder:
    """Encodes pictures of (width, height), upright and square-pixelled. Not shared between threads.

    ``rate``: for rate control only; ``gop``: frames from one keyframe to the next.
    """

    def __init__(self, size: tuple[int, int], *, rate: Fraction, crf: int, preset: str, gop: int) -> None:
        self._size = size
        self._coded = (size[0] + size[0] % 2, size[1] + size[1] % 2)
        self._rate, self._gop = rate, gop
        self._options = {"crf": str(crf), "preset": preset, "x264-params": _params(gop)}
        self._context: Any = None
        self._colour: Colour = BT601
        self._to_yuv = VideoReformatter()
        self._sent = 0

    def encode(self, picture: Picture) -> list[bytes]:
        """Add a frame; the packets that are ready, in order.

        Raises:
            MediaError: the encoder refuses it.
        """
        planes = self._direct(picture)
        if self._context is None:
            self._colour = BT601 if planes is None else picture.colour
            self._context = self._open()
        if planes is None or picture.colour != self._colour:
            planes = self._through_rgb(picture.rgb(*self._size))
        frame = av.VideoFrame(*self._coded, "yuv420p")
        for plane, pixels in zip(frame.planes, planes, strict=True):
            plane_array(plane, pixels.shape[1], pixels.shape[0])[...] = pixels
        frame.pts, frame.time_base = self._sent, 1 / self._rate
        self._sent += 1
        return self._packets(frame)

    def flush(self) -> list[bytes]:
        """The packets that are left."""
        return self._packets(None) if self._context is not None else []

    def _packets(self, frame: av.VideoFrame | None) -> list[bytes]:
        try:
            return [bytes(packet) for packet in self._context.encode(frame)]
        except av.error.FFmpegError as e:
            raise MediaError("crash", f"the H.264 encoder refuses {self._coded[0]}×{self._coded[1]}: {e}") from e

    def _direct(self, picture: Picture) -> Planes | None:
        return picture.video_planes(*self._size) if self._coded == self._size else None

    def _through_rgb(self, rgb: np.ndarray) -> Planes:
        (w, h), (coded_w, coded_h) = self._size, self._coded
        if self._coded != self._size:
            rgb = cv2.copyMakeBorder(rgb, 0, coded_h - h, 0, coded_w - w, cv2.BORDER_REPLICATE)
        space, is_full = self._colour
        frame = self._to_yuv.reformat(
            av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24"),
            format="yuv420p",
            dst_colorspace=_SWS.get(space, 5),
            dst_color_range=_FULL if is_full else _LIMITED,
        )
        y, u, v = frame.planes
        half = (coded_w // 2, coded_h // 2)
        return plane_array(y, coded_w, coded_h), plane_array(u, *half), plane_array(v, *half)

    def _open(self) -> Any:
        try:
            context: Any = av.CodecContext.create("libx264", "w")
        except (av.error.FFmpegError, ValueError) as e:
            raise MissingExtra("an FFmpeg with libx264", needed_for="payload.codec h264", extra="all") from e
        context.width, context.height = self._coded
        context.pix_fmt = "yuv420p"
        context.time_base, context.framerate = 1 / self._rate, self._rate
        context.thread_count = 1
        space, is_full = self._colour
        context.colorspace = space
        context.color_range = _FULL if is_full else _LIMITED
        context.options = self._options
        return context


def _params(gop: int) -> str:
    """Closed groups of fixed length, no reordering, parameter sets at every keyframe, one thread."""
    fixed = {
        **{"keyint": gop, "min-keyint": gop, "scenecut": 0, "open-gop": 0, "bframes": 0},
        **{"repeat-headers": 1, "annexb": 1, "threads": 1, "sliced-threads": 0, "lookahead-threads": 1},
    }
    return ":".join(f"{name}={value}" for name, value in fixed.items())


@functools.cache
def encoder_identity(crf: int, preset: str, gop: int) -> str:
    """Key of the pixels that come back of six frames encoded with these parameters: an upgrade of the encoder that
    changes no pixel computes nothing again.
    """
    encoder = H264Encoder((64, 48), rate=ASSUMED_RATE, crf=crf, preset=preset, gop=gop)
    geometry = Geometry(64, 48, Fraction(1), Orientation())
    x, y = np.meshgrid(np.arange(64), np.arange(48))
    packets: list[bytes] = []
    for t in range(6):
        rgb = np.stack([4 * x + 9 * t, 5 * y + (x * y) // 7, 255 - 3 * x + 2 * y * t], axis=2).astype(np.uint8)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
        packets += encoder.encode(Picture(frame, geometry))
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.thread_count = 1
    frames = [f for p in [*packets, *encoder.flush()] for f in decoder.decode(av.Packet(p))] + decoder.decode(None)
    return digest_bytes(b"".join(plane_array(p, p.width, p.height).tobytes() for f in frames for p in f.planes))
