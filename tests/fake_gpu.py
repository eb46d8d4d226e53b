"""A stand-in for NVDEC where there is no GPU: the CPU decodes, and hands over NV12 pictures as a GPU's download would.

Everything behind the download is the library's own. It fails on purpose, where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pyarrow as pa

import workers.nvdec
from videoflow.media.container import choose_stream, open_media
from videoflow.media.nvdec import NvdecDecoder
from videoflow.stage import Margin, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store.schemas import ARTIFACT_HEAD

#: Changes what comes out of packet n, or raises.
Fault = Callable[[int, list[av.VideoFrame]], list[av.VideoFrame]]


def nv12(frame: av.VideoFrame, *, width: int | None = None) -> av.VideoFrame:
    """The same samples with U and V in turns, all tags kept."""
    made = frame.reformat(format="nv12", width=width, src_color_range="JPEG", dst_color_range="JPEG")
    made.colorspace, made.color_range = frame.colorspace, frame.color_range
    return made


class FakeNvdec(NvdecDecoder):
    fault: Fault | None = None
    num_packets = 0

    def downloaded(self, packet: Any) -> list[av.VideoFrame]:
        frames = [nv12(frame) for frame in super().downloaded(packet)]
        self.num_packets += 1
        return frames if self.fault is None else self.fault(self.num_packets - 1, frames)


def opener(fault: Fault | None = None) -> Callable[..., Any]:
    """What `open_on_gpu` is where there is a GPU."""

    @contextmanager
    def open_on_gpu(path: str | Path, stream: int | None = None, *, pix_fmt: str) -> Iterator[FakeNvdec]:
        with open_media(path) as container:
            decoder = FakeNvdec(container, choose_stream(container, stream), pix_fmt)
            decoder.fault = fault
            yield decoder

    return open_on_gpu


def failing_at(packet: int) -> Fault:
    """One packet fails, as one does whose headers are damaged."""

    def fault(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        if number == packet:
            raise av.error.InvalidDataError(1094995529, "Invalid data found when processing input")
        return frames

    return fault


def darker(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
    """Pictures that nobody could take for the CPU's."""
    for frame in frames:
        plane = frame.planes[0]
        plane.update((np.frombuffer(plane, np.uint8) // 2).tobytes())
    return frames


class FakeGpuParams(StageParams):
    fails_at: int | None = None
    darkens: bool = False


class FakeGpu(PassConsumer):
    """Puts the stand-in into the decoding child that it is set up in. ``fails_at``: packet of every video;
    ``darkens``: every picture.
    """

    name: ClassVar[str] = "fake_gpu"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "fake_gpu"
    Params: ClassVar[type[StageParams]] = FakeGpuParams

    def schema(self) -> pa.Schema:
        return pa.schema(ARTIFACT_HEAD)

    def setup(self) -> None:
        workers.nvdec.open_on_gpu = opener()
        workers.nvdec.check_gpu()  # the clips come out right, whatever is to fail after
        if self.params.fails_at is not None:
            workers.nvdec.open_on_gpu = opener(failing_at(self.params.fails_at))
        if self.params.darkens:
            workers.nvdec.open_on_gpu = opener(darker)

    def begin(self, video: VideoHeader) -> None: ...

    def see(self, frame: ShownFrame) -> None: ...

    def finish(self, summary: VideoSummary) -> Product:
        return Product(digest="0" * 32)

    def margin(self) -> Margin:
        return Margin()

    def join(self, parts: Sequence[Product]) -> Product:
        return Product(digest="0" * 32)
