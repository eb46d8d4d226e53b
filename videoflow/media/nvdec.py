"""Decoding on NVIDIA's decoder (NVDEC), through the same FFmpeg: all but the pictures stays with the CPU's code.

Demuxing, pts, order, colour tags and geometry are those of `Decoder`; the GPU turns packets into NV12 pictures, which
are downloaded and become the planes that the CPU would have made. Only what both must make to the bit goes there: 8-bit
4:2:0 of codecs whose decoding is specified exactly. A GPU hides damage in its own way, so whatever fails, is damaged,
or comes out as something else is left to the CPU, and then the whole video is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import av
import av.error
from av.codec.hwaccel import HWAccel
from av.video.reformatter import ColorRange, VideoReformatter

from videoflow.errors import MediaError, SystemFailure, VideoflowError, first_line
from videoflow.media.container import choose_stream, open_media
from videoflow.media.decoder import Decoder
from videoflow.media.picture import FAST_FORMATS

#: By FFmpeg's names. AV1 is missing: PyAV opens it with dav1d, which has no GPU behind it.
CODECS = frozenset({"h264", "hevc", "vp9"})
DOWNLOADED = "nv12"
#: FFmpeg's device options in the order they are tried: the context that the process's CUDA programs share (made once,
#: but not to be had where another library has set it up in its own way), or one for every video.
_CONTEXTS: tuple[dict[str, object], ...] = ({"primary_ctx": "1"}, {})


class LeftToCpu(VideoflowError):
    """Why a video is decoded by the CPU after all; never shown as an error."""


@functools.cache
def gpu() -> HWAccel:
    """This process's hold on the GPU, kept, so that a video need not wait for a context of its own.

    Raises:
        SystemFailure: there is no GPU, no driver, or no CUDA in this FFmpeg.
    """
    why = "its FFmpeg has no CUDA"
    for options in _CONTEXTS:
        with _native_log() as said:
            try:
                return HWAccel("cuda", allow_software_fallback=False, options=options).create(av.Codec("h264", "r"))
            except (av.error.FFmpegError, NotImplementedError) as e:
                why = said[0][2].strip() if said else first_line(e)
    raise SystemFailure(
        f"decoder: nvdec needs an NVIDIA GPU and its driver, and this machine gives none ({why}); "
        "run the same command again where there is one, or with --set decoder=cpu"
    )


@contextmanager
def _native_log() -> Iterator[list[tuple[int, str, str]]]:
    """What FFmpeg says of errors meanwhile: its error codes do not tell a missing driver from a missing permission."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as said:
            yield said
    finally:
        av.logging.set_level(level)


def suits_gpu(path: str | Path, stream: int | None = None) -> str:
    """The pixel format that the CPU would decode a file's stream to, which the GPU's pictures are brought into.

    Raises:
        LeftToCpu: its codec or its pixel format is none that both decode to the bit.
        MediaError: see `open_media` and `choose_stream`.
    """
    with open_media(path) as container:
        context = choose_stream(container, stream).codec_context
        codec, pix_fmt = context.codec.canonical_name, str(context.pix_fmt)
    if codec not in CODECS:
        raise LeftToCpu(f"codec {codec}")
    if pix_fmt not in FAST_FORMATS:
        raise LeftToCpu(f"pixel format {pix_fmt}")
    return pix_fmt


class NvdecDecoder(Decoder):
    """A Decoder whose packets go to the GPU. ``pix_fmt``: see `suits_gpu`. `frames` raises LeftToCpu, at its end at
    the latest.
    """

    def __init__(self, container: av.container.InputContainer, stream: Any, pix_fmt: str) -> None:
        super().__init__(container, stream)
        self._pix_fmt = pix_fmt
        self._size: tuple[int, int] | None = None
        self._reformatter = VideoReformatter()

    def frames(self) -> Iterator[av.VideoFrame]:
        try:
            yield from super().frames()
        except MediaError as e:
            raise LeftToCpu(f"{e.code}") from e
        if self.tally.failed_packets or self.tally.damage:
            raise LeftToCpu("damaged")

    def decoded(self, packet: Any) -> list[av.VideoFrame]:
        try:
            frames = self.downloaded(packet)
        except (av.error.FFmpegError, MemoryError) as e:  # FFmpeg's own is both, where the GPU has no room for surfaces
            raise LeftToCpu("a packet that the GPU does not decode") from e
        return [self._planar(frame) for frame in frames]

    def downloaded(self, packet: Any) -> list[av.VideoFrame]:
        """The GPU's pictures, in memory."""
        return super().decoded(packet)

    def _planar(self, frame: av.VideoFrame) -> av.VideoFrame:
        """The same picture with U and V apart: no value changes."""
        if frame.format.name != DOWNLOADED:
            raise LeftToCpu(f"pictures that come as {frame.format.name}")
        size = (frame.width, frame.height)
        if self._size is None:  # as the headers say: a GPU does not cut what they cut off at the left and the top
            context = self.stream.codec_context
            self._size = (context.width, context.height)
        if size != self._size:
            raise LeftToCpu("pictures of another size than its headers say")
        is_full = self._pix_fmt.startswith("yuvj")
        ranges = {"src_color_range": ColorRange.JPEG, "dst_color_range": ColorRange.JPEG} if is_full else {}
        planar = self._reformatter.reformat(frame, format=self._pix_fmt, threads=1, **ranges)
        planar.colorspace, planar.color_range = frame.colorspace, frame.color_range
        return planar


@contextmanager
def open_on_gpu(path: str | Path, stream: int | None = None, *, pix_fmt: str) -> Iterator[Decoder]:
    """A Decoder on the GPU over a file's chosen stream, which `suits_gpu` has looked at.

    Raises:
        SystemFailure: no GPU, or it is gone. LeftToCpu: it has no place.
    """
    options = dict(gpu().options)
    with ExitStack() as stack:
        try:
            accelerator = HWAccel("cuda", allow_software_fallback=False, options=options)
            container = stack.enter_context(open_media(path, accelerator))
        except (MediaError, RuntimeError) as e:  # the file could be opened a moment ago: it is the GPU
            gpu.cache_clear()
            gpu()
            raise LeftToCpu("no place on the GPU") from e
        yield NvdecDecoder(container, choose_stream(container, stream), pix_fmt)
