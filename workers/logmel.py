"""Log-mel spectra of a video's sound on the video's own clock, for models that take them in place of samples.

Spectrum j is of the ``n_fft`` samples around sample j · hop, so that it does not depend on where rows begin; holes and
what lies before the first picture are silence. The defaults are Whisper's: 25 ms, every 10 ms, 80 Slaney filters.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from videoflow.errors import MediaError, MissingExtra, first_line
from videoflow.keys import digest, digest_bytes
from videoflow.stage import HeardSound, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store import schemas
from workers.sound_canary import sound_identity
from workers.sound_line import Piece, SoundLine

PACKAGE = "transformers"
#: Below this power nothing is told apart: log10 of it is the least value.
FLOOR = 1e-10
DTYPE = np.dtype("<f2")


class LogMelParams(StageParams):
    """``rate``: samples a second; ``n_fft``, ``hop``: in samples; ``bins``: mel filters; ``stream``: as of stage audio;
    ``row_steps``: spectra a row.
    """

    rate: Literal[8000, 16000, 22050, 24000, 32000, 44100, 48000] = 16000
    n_fft: int = Field(400, ge=32, le=8192)
    hop: int = Field(160, ge=8, le=8192)
    bins: int = Field(80, ge=8, le=512)
    stream: int | None = Field(None, ge=0)
    row_steps: int = Field(1000, ge=10, le=100_000)

    @model_validator(mode="after")
    def _is_even(self) -> LogMelParams:
        if self.n_fft % 2 or self.hop > self.n_fft:
            raise ValueError("n_fft must be even and at least hop: a spectrum lies around its sample")
        return self


class LogMel(PassConsumer):
    """Hears one audio stream, mixed to one channel: log10 of the power, float16; no row for a video without audio."""

    name: ClassVar[str] = "logmel"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "logmel"
    Params: ClassVar[type[StageParams]] = LogMelParams
    sees: ClassVar[bool] = False
    hears: ClassVar[bool] = True

    def schema(self) -> pa.Schema:
        return schemas.LOGMEL

    def identity(self) -> dict[str, str]:
        return {"sound": sound_identity()}

    def audio_stream(self) -> int | None:
        stream: int | None = self.params.stream
        return stream

    def setup(self) -> None:
        """Raises MissingExtra where the library is not installed."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise MissingExtra(PACKAGE, needed_for="stage logmel", extra="transformers")
        p, self._lib = self.params, importlib.import_module(f"{PACKAGE}.audio_utils")
        self._filters = self._lib.mel_filter_bank(
            1 + p.n_fft // 2, p.bins, 0.0, p.rate / 2, p.rate, norm="slaney", mel_scale="slaney"
        )
        self._window = self._lib.window_function(p.n_fft, "hann")

    def begin(self, video: VideoHeader) -> None:
        self._line = SoundLine(start=video.start_pts * video.time_base, rate=self.params.rate, channels=1)
        self._held = np.zeros(self.params.n_fft // 2, np.float32)  # from half a window before the next spectrum on
        self._at = self._step = 0  # the next sample that comes, the next spectrum
        self._places: list[tuple[int, int]] = []

    def see(self, frame: ShownFrame) -> None:
        """It needs no picture."""

    def hear(self, sound: HeardSound) -> Iterator[dict[str, Any]]:
        try:
            yield from self._take(self._line.add(sound))
        except (ValueError, OSError) as e:  # FFmpeg's errors are both
            raise MediaError("codec_unsupported", f"its sound cannot be resampled: {first_line(e)}") from e

    def finish(self, summary: VideoSummary) -> Product:
        """The last rows. The digest is over their places: float spectra move in the last digits."""
        rows = list(self._take(self._line.end()))
        p = self.params
        while (count := min(p.row_steps, -(-self._at // p.hop) - self._step)) > 0:
            length = (count - 1) * p.hop + p.n_fft
            self._held = np.pad(self._held, (0, max(0, length - len(self._held))))
            rows.append(self._row(count))
        return Product(rows=rows, digest=digest("logmel", self._places))

    def _take(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        for first, samples in pieces:
            while self._at < first:  # a long hole a second at a time
                yield from self._add(np.zeros(min(self.params.rate, first - self._at), np.float32))
            yield from self._add(samples[0])

    def _add(self, samples: np.ndarray) -> Iterator[dict[str, Any]]:
        p = self.params
        self._at += len(samples)
        self._held = np.concatenate([self._held, samples])
        while len(self._held) >= (p.row_steps - 1) * p.hop + p.n_fft:
            yield self._row(p.row_steps)

    def _row(self, count: int) -> dict[str, Any]:
        """The next ``count`` spectra."""
        p, options = self.params, {"power": 2.0, "center": False, "mel_floor": FLOOR, "log_mel": "log10"}
        samples = self._held[: (count - 1) * p.hop + p.n_fft]
        power = self._lib.spectrogram(samples, self._window, p.n_fft, p.hop, mel_filters=self._filters, **options)
        data = np.ascontiguousarray(power.T).astype(DTYPE).tobytes()
        row = {"rate": p.rate, "hop": p.hop, "bins": p.bins, "first_step": self._step, "n": count}
        self._places.append((self._step, count))
        self._held, self._step = self._held[count * p.hop :], self._step + count
        return {**row, "digest": digest_bytes(data), "data": data}
