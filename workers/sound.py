"""What a video's sound is like, from the audio cache, without its source: loudness, silence and speech in small steps.

They are pooled onto clips when a version is published, so that new cuts cost nothing (`videoflow.dataset.sound`). All
is measured on the sound as it is cached: mixed down and at the cache's rate.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import av
import av.error
import numpy as np
import pyarrow as pa

from videoflow.errors import BadSample, MediaError, MissingExtra, MissingWeights
from videoflow.keys import digest, digest_file
from videoflow.media.sound import LAYOUTS, Resampler, as_int16, decode_run
from videoflow.stage import Item, Product, StageParams, VideoStage
from videoflow.store import schemas
from videoflow.store.blobs import iter_records

#: Steps of loudness and of silence a second: EBU Tech 3341 moves its 400 ms window by 100 ms.
STEPS_PER_SECOND = 10
#: The voice detector looks at 512 samples at 16 kHz.
SPEECH_RATE, SPEECH_WINDOW = 16_000, 512
VAD_PACKAGE, VAD_FILE = "silero_vad", "data/silero_vad.jit"


def vad_weights() -> Path:
    """The voice detector's weights inside the installed package (MIT; its own code wants torchaudio).

    Raises:
        MissingExtra: the package is not installed. MissingWeights: it is, but its weights are not there.
    """
    spec = importlib.util.find_spec(VAD_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("silero-vad", needed_for="sound with speech: silero", extra="speech")
    path = Path(spec.submodule_search_locations[0]) / VAD_FILE
    if not path.is_file():
        raise MissingWeights(f"{VAD_FILE} is not in {VAD_PACKAGE}: install silero-vad again")
    return path


class SoundParams(StageParams):
    """``speech``: silero, off, or auto (silero where its package and torch are there; never in a fingerprint)."""

    speech: Literal["auto", "silero", "off"] = "auto"


class Sound(VideoStage):
    """Measures the cached sound of a video; one row a video, none where there is no sound."""

    name: ClassVar[str] = "sound"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "sound"
    inputs: ClassVar[tuple[str, ...]] = ("audio",)
    media: ClassVar[tuple[str, ...]] = ("audio",)
    Params: ClassVar[type[StageParams]] = SoundParams

    @classmethod
    def resolve(cls, params: SoundParams) -> SoundParams:
        if params.speech != "auto":
            return params
        is_there = all(importlib.util.find_spec(name) is not None for name in (VAD_PACKAGE, "torch"))
        return params.model_copy(update={"speech": "silero" if is_there else "off"})

    def schema(self) -> pa.Schema:
        return schemas.SOUND

    def identity(self) -> dict[str, str]:
        return {"weights": digest_file(vad_weights())} if self.params.speech == "silero" else {}

    def setup(self) -> None:
        self._vad = load_vad() if self.params.speech == "silero" else None

    def process(self, item: Item) -> Product:
        """One row of lists; the digest is over their integers."""
        rows = item.rows["audio"]
        if not rows:
            return Product(digest=digest("sound"))
        rate, channels = rows[0]["rate"], rows[0]["channels"]
        loudness, levels = Loudness(rate, channels), Levels(rate)
        speech = Speech(self._vad, rate, channels) if self._vad is not None else None
        for samples, heard in line_of(item, rate, channels):
            loudness.add(samples)
            levels.add(samples, heard)
            if speech is not None:
                speech.add(samples)
        row: dict[str, Any] = {
            "rate": rate,
            "channels": channels,
            "loudness": loudness.end(),
            **levels.end(),
            "speech": speech.end() if speech is not None else None,
        }
        return Product(rows=[row], digest=digest("sound", rate, channels, row["peak"], row["heard"]))


def line_of(item: Item, rate: int, channels: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The sound of a video from its start on, a second or more at a time: samples float32 (channels, n), silence in the
    holes, and which of them were heard, bool (n,).

    Raises:
        MediaError: the cached bytes are damaged.
    """
    at = 0
    for _, data in item.blobs("audio"):
        try:
            for record in iter_records(data):
                samples, _ = decode_run(record.payload)
                while at < record.pts:  # long holes a second at a time
                    count = min(rate, record.pts - at)
                    yield np.zeros((channels, count), np.float32), np.zeros(count, bool)
                    at += count
                yield samples, np.ones(samples.shape[1], bool)
                at += samples.shape[1]
        except BadSample as e:
            raise MediaError("io_error", f"its cached sound is damaged ({e}); recompute stage audio for it") from e


#: Key under which FFmpeg's filter leaves its momentary loudness with a frame.
LOUDNESS = "lavfi.r128.M"


class Loudness:
    """Momentary loudness (EBU R 128: 400 ms, K-weighted, LUFS), one value a step, by FFmpeg's ebur128.

    Value j is of the 400 ms that end at (j + 1) / 10 s; the first three have not heard that much and are no measure.
    """

    def __init__(self, rate: int, channels: int) -> None:
        self._rate, self._layout, self._at = rate, LAYOUTS[channels], 0
        self._values: list[float] = []
        self._graph = av.filter.Graph()
        nodes = (
            self._graph.add_abuffer(format="fltp", sample_rate=rate, layout=self._layout, time_base=Fraction(1, rate)),
            self._graph.add("ebur128", "metadata=1"),
            self._graph.add("abuffersink"),
        )
        self._graph.link_nodes(*nodes).configure()

    def add(self, samples: np.ndarray) -> None:
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=self._layout)
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._at, Fraction(1, self._rate)
        self._at += samples.shape[1]
        self._graph.push(frame)
        self._pull()

    def end(self) -> list[float]:
        self._graph.push(None)
        self._pull()
        return self._values[: self._at * STEPS_PER_SECOND // self._rate]

    def _pull(self) -> None:
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            if LOUDNESS in frame.metadata:  # the last piece, shorter than a step, comes without
                self._values.append(float(frame.metadata[LOUDNESS]))


class Levels:
    """By step: the peak of the samples as 16-bit integers, and how many samples were heard."""

    def __init__(self, rate: int) -> None:
        self._step = rate // STEPS_PER_SECOND
        self._rest = np.zeros(0, np.int32)
        self._rest_heard = np.zeros(0, bool)
        self._peaks: list[int] = []
        self._heard: list[int] = []

    def add(self, samples: np.ndarray, heard: np.ndarray) -> None:
        peak = np.abs(as_int16(samples).astype(np.int32)).max(axis=0)
        self._rest = np.concatenate([self._rest, peak])
        self._rest_heard = np.concatenate([self._rest_heard, heard])
        self._take(len(self._rest) // self._step)

    def end(self) -> dict[str, list[int]]:
        missing = -len(self._rest) % self._step
        if missing:
            self._rest = np.pad(self._rest, (0, missing))
            self._rest_heard = np.pad(self._rest_heard, (0, missing))
            self._take(1)
        return {"peak": self._peaks, "heard": self._heard}

    def _take(self, steps: int) -> None:
        if not steps:
            return
        stop = steps * self._step
        self._peaks += self._rest[:stop].reshape(steps, -1).max(axis=1, initial=0).tolist()
        self._heard += self._rest_heard[:stop].reshape(steps, -1).sum(axis=1).tolist()
        self._rest, self._rest_heard = self._rest[stop:], self._rest_heard[stop:]


@functools.cache
def load_vad() -> Any:
    """The voice detector, a TorchScript module of its package.

    Raises:
        MissingExtra: silero-vad or torch is not installed. MissingWeights: the file cannot be read.
    """
    path = vad_weights()
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", needed_for="sound with speech: silero", extra="speech")
    import torch

    try:
        return torch.jit.load(str(path), map_location="cpu").eval()
    except (RuntimeError, OSError) as e:
        raise MissingWeights(f"the voice detector {VAD_FILE} cannot be read; install silero-vad again") from e


class Speech:
    """How sure the voice detector is of speech, 0…1, one value a window of 32 ms, of the mean of the channels."""

    def __init__(self, vad: Any, rate: int, channels: int) -> None:
        self._vad = vad
        self._vad.reset_states()
        layout = LAYOUTS[channels]
        self._resampler = Resampler(layout=layout, rate=rate, to_rate=SPEECH_RATE, to_channels=1)
        self._rest = np.zeros(0, np.float32)
        self._values: list[float] = []

    def add(self, samples: np.ndarray) -> None:
        for block in self._resampler.push(samples):
            self._listen(block[0])

    def end(self) -> list[float]:
        for block in self._resampler.end():
            self._listen(block[0])
        if len(self._rest):
            self._listen(np.zeros(-len(self._rest) % SPEECH_WINDOW, np.float32))
        return self._values

    def _listen(self, samples: np.ndarray) -> None:
        import torch

        self._rest = np.concatenate([self._rest, samples])
        stop = len(self._rest) // SPEECH_WINDOW * SPEECH_WINDOW
        with torch.inference_mode():
            for at in range(0, stop, SPEECH_WINDOW):
                window = torch.from_numpy(self._rest[at : at + SPEECH_WINDOW].copy())[None]
                self._values.append(float(self._vad(window, SPEECH_RATE)))
        self._rest = self._rest[stop:]
