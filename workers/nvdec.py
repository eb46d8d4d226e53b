"""Who decodes a pass: the CPU, or the GPU where a recipe says ``decoder: nvdec``, and when the GPU may be believed.

A GPU's results never stand in for the CPU's: the choice is part of every fingerprint of the pass, as a tag. It is no
digest, so that a machine without a GPU can plan for one that has it; in return the first video that goes to the GPU in
a process waits until small clips came out of it as they come out of the CPU, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np

from videoflow.errors import SystemFailure
from videoflow.media.decoder import open_decoder
from videoflow.media.nvdec import LeftToCpu, open_on_gpu, suits_gpu
from videoflow.media.picture import plane_array
from videoflow.stage import NVDEC, PassConsumer
from workers.decode import Opener

#: Larger than those of the decoder's identity, since GPUs refuse HEVC below 144 pixels and VP9 below 128; sides are no
#: multiples of a block. Made as workers/canary.py says of the same names, from testsrc2=size=210x150:rate=8:duration=1
#: with -crf 30 (VP9 40); h264_interlaced at 210 × 148 with -vf setfield=tff and -flags:v +ildct+ilme+bitexact.
CLIPS = Path(__file__).parent / "canaries" / "nvdec"
#: By the first letters of a clip's name: what every GPU decodes. The rest it may refuse, but not get wrong.
ALWAYS = "h264"
#: Largest difference of a sample from the CPU's: decoding these codecs is specified to the bit.
TOLERANCE = 0

T = TypeVar("T")


def decoder_of(consumers: Iterable[PassConsumer]) -> str:
    """The recipe's choice, which all consumers of a pass carry."""
    (decoder,) = {c.decoder for c in consumers}
    return decoder


def by_decoder(decoder: str, path: str | Path, stream: int | None, work: Callable[[Opener], T]) -> tuple[T, str | None]:
    """The result of ``work`` with what opens a file for this decoder, and why the GPU left it to the CPU if it did.
    Work is then done again from the beginning: it must forget what it had.

    Raises:
        SystemFailure: a GPU is asked for, and there is none or it is not to be believed.
        MediaError: the file cannot be used.
    """
    why = None
    if decoder == NVDEC:
        try:
            pix_fmt = suits_gpu(path, stream)
            check_gpu()
            return work(partial(open_on_gpu, pix_fmt=pix_fmt)), None
        except LeftToCpu as e:
            why = str(e)
    return work(open_decoder), why


@functools.cache
def check_gpu() -> None:
    """Compare the GPU with the CPU on all clips, once a process.

    Raises:
        SystemFailure: no GPU, or another result.
    """
    for path in sorted(CLIPS.iterdir()):
        try:
            differs = largest_difference(path)
        except LeftToCpu as e:
            if path.stem.startswith(ALWAYS):
                raise SystemFailure(
                    f"decoder: nvdec cannot be used, this GPU does not decode {path.stem} ({e}); in a container it "
                    "takes the driver's video libraries (NVIDIA_DRIVER_CAPABILITIES=compute,utility,video); "
                    "or run with --set decoder=cpu"
                ) from e
            continue
        if differs > TOLERANCE:
            raise SystemFailure(
                f"decoder: nvdec cannot be believed here, clip {path.stem} comes out of the GPU with samples that "
                f"differ by up to {differs} from the CPU's ({TOLERANCE} is allowed); run with --set decoder=cpu"
            )


def largest_difference(path: str | Path, stream: int | None = None) -> int:
    """The largest difference of a sample of Y, U or V between GPU and CPU over all frames of a stream; 256 where their
    times, sizes or formats differ.

    Raises:
        LeftToCpu: the GPU does not take it.
    """
    most = 0
    pix_fmt = suits_gpu(path, stream)
    with open_decoder(path, stream) as cpu, open_on_gpu(path, stream, pix_fmt=pix_fmt) as gpu:
        theirs = gpu.frames()
        for frame in cpu.frames():
            other = next(theirs, None)
            if other is None or _form(other) != _form(frame):
                return 256
            for a, b in zip(_planes(frame), _planes(other), strict=True):
                most = max(most, int(np.abs(a.astype(np.int16) - b).max()))
        return most if next(theirs, None) is None else 256


def _form(frame: av.VideoFrame) -> tuple[Any, ...]:
    return frame.pts, frame.format.name, frame.width, frame.height, int(frame.color_range), int(frame.colorspace)


def _planes(frame: av.VideoFrame) -> list[np.ndarray]:
    return [plane_array(plane, plane.width, plane.height) for plane in frame.planes]
