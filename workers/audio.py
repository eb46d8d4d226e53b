"""The audio cache: one audio stream of a video on the video's own clock, in chunks as the frame cache has them.

Sample k is at the video's first shown pts + k / rate seconds. A chunk holds runs of samples without a hole, each a
record that proves itself; where nothing was heard there is no run, and the loader gives silence and says so. 16 kHz
mono is the default: what speech models and most audio-visual encoders take, about 20 kB a second as FLAC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from videoflow.errors import MediaError, first_line
from videoflow.keys import digest, digest_bytes
from videoflow.media.sound import as_int16, encode_flac, encode_opus
from videoflow.stage import HeardSound, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store import schemas
from videoflow.store.blobs import pack_records
from workers.sound_line import Piece, SoundLine

OPUS_RATE = 48_000


class AudioParams(StageParams):
    """``rate``: samples a second; ``channels``: 1 mixes down; ``codec``: flac is exact (16 bits), opus is 48 kHz and
    lossy; ``kbps``: of Opus; ``stream``: container index of the audio stream, None for the first; ``chunk_seconds``:
    grain.
    """

    rate: Literal[8000, 16000, 22050, 24000, 32000, 44100, 48000] = 16000
    channels: Literal[1, 2] = 1
    codec: Literal["flac", "opus"] = "flac"
    kbps: int = Field(64, ge=6, le=256)
    stream: int | None = Field(None, ge=0)
    chunk_seconds: int = Field(4, ge=1, le=60)

    @model_validator(mode="after")
    def _opus_has_one_rate(self) -> AudioParams:
        if self.codec == "opus" and self.rate != OPUS_RATE:
            raise ValueError(f"codec opus decodes at {OPUS_RATE} only: set rate to {OPUS_RATE}, or codec to flac")
        return self


class Audio(PassConsumer):
    """Hears one audio stream and hands over one row a chunk; none for a video without audio."""

    name: ClassVar[str] = "audio"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "audio"
    Params: ClassVar[type[StageParams]] = AudioParams
    sees: ClassVar[bool] = False
    hears: ClassVar[bool] = True

    def schema(self) -> pa.Schema:
        return schemas.AUDIO

    def identity(self) -> dict[str, str]:
        from workers.sound_canary import sound_identity

        return {"sound": sound_identity()}

    def audio_stream(self) -> int | None:
        stream: int | None = self.params.stream
        return stream

    def begin(self, video: VideoHeader) -> None:
        p = self.params
        self._line = SoundLine(start=video.start_pts * video.time_base, rate=p.rate, channels=p.channels)
        self._chunk = self._stream = 0
        self._runs: list[tuple[int, list[np.ndarray]]] = []
        self._end = -1  # sample behind the last one
        self._failed = self._told_failed = self._told_overlap = 0
        self._digests: list[str] = []

    def see(self, frame: ShownFrame) -> None:
        """It needs no picture."""

    def hear(self, sound: HeardSound) -> Iterator[dict[str, Any]]:
        self._failed = sound.num_failed
        self._stream = sound.stream
        try:
            yield from self._take(self._line.add(sound))
        except (ValueError, OSError) as e:  # FFmpeg's errors are both
            raise MediaError("codec_unsupported", f"its sound cannot be resampled: {first_line(e)}") from e

    def finish(self, summary: VideoSummary) -> Product:
        """The last chunks. The digest is over those of all chunks' bytes."""
        self._failed = summary.sound_failed
        rows = [*self._take(self._line.end()), *self._flush()]
        return Product(rows=rows, digest=digest("audio", *self._digests))

    def _take(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        length = self.params.chunk_seconds * self.params.rate
        for first, samples in pieces:
            at = first
            while at < first + samples.shape[1]:
                stop = min(first + samples.shape[1], (at // length + 1) * length)
                if at // length != self._chunk:
                    yield from self._flush()
                    self._chunk = at // length
                if at != self._end or not self._runs:
                    self._runs.append((at, []))
                self._runs[-1][1].append(samples[:, at - first : stop - first])
                at = self._end = stop

    def _flush(self) -> Iterator[dict[str, Any]]:
        if not self._runs:
            return
        runs = [(first, np.concatenate(pieces, axis=1)) for first, pieces in self._runs]
        self._runs = []
        data, offsets = pack_records((first, self._encoded(samples)) for first, samples in runs)
        blob_digest = digest_bytes(data)
        self._digests.append(blob_digest)
        counts = [samples.shape[1] for _, samples in runs]
        p, overlap = self.params, self._line.overlap_samples
        yield {
            "audio_stream": self._stream,
            "chunk": self._chunk,
            "rate": p.rate,
            "channels": p.channels,
            "codec": p.codec,
            "first_sample": runs[0][0],
            "n": sum(counts),
            "first_samples": [first for first, _ in runs],
            "counts": counts,
            "offsets": offsets,
            "failed_packets": self._failed - self._told_failed,
            "overlap_samples": overlap - self._told_overlap,
            "digest": blob_digest,
            "data": data,
        }
        self._told_failed, self._told_overlap = self._failed, overlap

    def _encoded(self, samples: np.ndarray) -> bytes:
        if self.params.codec == "opus":
            return encode_opus(samples, bit_rate=self.params.kbps * 1000)
        return encode_flac(as_int16(samples), self.params.rate)
