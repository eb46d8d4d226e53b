"""A run of sound as bytes and back, and from any rate and layout to the wanted ones. All of it by FFmpeg through PyAV.

A FLAC run is a FLAC file of its own (16 bits, exact, its samples' count and MD5 in its header). An Opus run is an Ogg
Opus file of its own: its header tells the encoder's delay (pre-skip) and its last page where it ends, so that any
decoder gives exactly the samples that went in, at their places.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, cast

import av
import av.error
import numpy as np

from videoflow.errors import BadSample, MediaError, first_line

LAYOUTS = {1: "mono", 2: "stereo"}
#: What a count of channels is taken for where a stream names no layout (FFmpeg's defaults).
DEFAULT_LAYOUTS = {**LAYOUTS, 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
FULL_SCALE = 32768
_FLAC_HEADER = b"fLaC" + bytes([0x80, 0, 0, 34])  # the only metadata block is STREAMINFO
_OPUS_RATE, _OPUS_FRAME = 48_000, 960
_INTEGERS = {"u8": (128, 128), "s16": (0, FULL_SCALE), "s32": (0, 1 << 31)}


def as_floats(frame: av.AudioFrame) -> np.ndarray:
    """A decoded frame as float32 (channels, n), full scale ±1.

    Raises:
        MediaError: a sample format that is none of FFmpeg's usual ones.
    """
    name = frame.format.name.removesuffix("p")
    try:
        values: Any = frame.to_ndarray()
    except ValueError as e:
        raise MediaError("codec_unsupported", f"audio samples of format {frame.format.name}") from e
    if not frame.format.is_planar:
        values = values.reshape(-1, len(frame.layout.channels)).T
    if name in _INTEGERS:
        zero, scale = _INTEGERS[name]
        values = (values.astype(np.float64) - zero) / scale
    return np.nan_to_num(values.astype(np.float32), posinf=0.0, neginf=0.0)


def layout_of(frame: av.AudioFrame) -> str:
    """A frame's channel layout by name, FFmpeg's default one where the stream names none.

    Raises:
        MediaError: more than eight channels without a layout.
    """
    name, count = frame.layout.name, len(frame.layout.channels)
    if not name.endswith("channels"):
        return str(name)
    if count not in DEFAULT_LAYOUTS:
        raise MediaError("codec_unsupported", f"{count} audio channels without a layout")
    return DEFAULT_LAYOUTS[count]


def as_int16(samples: np.ndarray) -> np.ndarray:
    """Samples of full scale ±1 as int16, rounded to nearest: exact for what was 16 bits."""
    return np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


class Resampler:
    """One line of sound to another rate and layout by swresample: sample k of the result lies at k / rate after the
    first sample that went in. Mixing down never exceeds full scale, as FFmpeg mixes 16-bit sound.
    """

    def __init__(self, *, layout: str, rate: int, to_rate: int, to_channels: int) -> None:
        self._layout, self._rate, self._at = layout, rate, 0
        to_layout = LAYOUTS[to_channels]
        self._graph = av.filter.Graph()
        nodes = (
            self._graph.add_abuffer(format="fltp", sample_rate=rate, layout=layout, time_base=Fraction(1, rate)),
            self._graph.add("aresample", f"{to_rate}:ochl={to_layout}:osf=fltp:rematrix_maxval=1.0"),
            self._graph.add("aformat", f"sample_fmts=fltp:sample_rates={to_rate}:channel_layouts={to_layout}"),
            self._graph.add("abuffersink"),
        )
        self._graph.link_nodes(*nodes).configure()

    def push(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Give it float32 (channels, n); what is ready comes back, float32 (to_channels, m) each."""
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=self._layout)
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._at, Fraction(1, self._rate)
        self._at += samples.shape[1]
        self._graph.push(frame)
        return self._ready()

    def end(self) -> Iterator[np.ndarray]:
        """The rest."""
        self._graph.push(None)
        return self._ready()

    def _ready(self) -> Iterator[np.ndarray]:
        while True:
            try:
                frame = cast(av.AudioFrame, self._graph.pull())
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            yield frame.to_ndarray()


def encode_flac(samples: np.ndarray, rate: int) -> bytes:
    """A FLAC file of int16 (channels, n), n ≥ 1."""
    coder = av.CodecContext.create("flac", "w")
    coder.sample_rate, coder.format, coder.layout = rate, "s16", LAYOUTS[len(samples)]
    coder.time_base = Fraction(1, rate)
    coder.open()
    packets = [p for frame in _frames(samples, rate, "s16", coder.frame_size) for p in coder.encode(frame)]
    packets += coder.encode(None)
    header = bytes(coder.extradata or b"")  # complete only now: it holds the count and the digest of all samples
    return _FLAC_HEADER + header + b"".join(bytes(p) for p in packets if p.size)


def encode_opus(samples: np.ndarray, *, bit_rate: int) -> bytes:
    """An Ogg Opus file of float32 (channels, n), n ≥ 1, at 48 kHz."""
    out = io.BytesIO()
    with av.open(out, "w", format="opus", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libopus", rate=_OPUS_RATE, layout=LAYOUTS[len(samples)])
        stream.bit_rate, stream.codec_context.format = bit_rate, "flt"
        for frame in [*_frames(samples, _OPUS_RATE, "flt", _OPUS_FRAME), None]:
            container.mux(stream.encode(frame))
    return out.getvalue()


def _frames(samples: np.ndarray, rate: int, kind: str, size: int) -> Iterator[av.AudioFrame]:
    for at in range(0, samples.shape[1], size):
        packed = np.ascontiguousarray(samples[:, at : at + size].T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format=kind, layout=LAYOUTS[len(samples)])
        frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
        yield frame


def decode_run(data: bytes | memoryview) -> tuple[np.ndarray, int]:
    """(float32 (channels, n), samples a second) of a run's bytes, which must have been proved by their CRC.

    Raises:
        BadSample: they do not decode.
    """
    kind = "flac" if bytes(data[:4]) == b"fLaC" else "ogg"
    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            pieces = [as_floats(frame) for frame in container.decode(stream)]
            rate = int(stream.codec_context.sample_rate)
    except (av.error.FFmpegError, IndexError, MediaError) as e:
        raise BadSample(f"a run of sound does not decode: {first_line(e)}") from e
    if not pieces:
        raise BadSample("a run of sound holds no samples")
    return np.concatenate(pieces, axis=1), rate
