"""Sound of samples: which samples of the audio cache go with the delivered frames, read, proved and decoded.

Sample j of a batch's ``audio`` lies at ``audio_start_seconds`` + j / rate, and the first one at the pts of the sample's
first delivered frame (to half an audio sample). Nothing from outside the clip is delivered: what is not there, or was
not heard, is zero and not ``audio_valid``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from videoflow.errors import BadSample, LoaderError
from videoflow.loader.reader import BlobRef, ClipReader, ClipRef, EncodedClip, VersionSource
from videoflow.media.sound import decode_run
from videoflow.store.blobs import iter_records
from videoflow.timeline import round_half_up

if TYPE_CHECKING:
    from videoflow.loader.rows import VersionRows
    from videoflow.loader.sampling import Sampling

#: What it needs of a version's rows, beside what the loader reads anyway.
COLUMNS = ("audio", "audio_rate", "audio_channels", "t1_pts", "start_pts")


@dataclass(frozen=True)
class ClipSound:
    """The sound of one sample, as bytes.

    Attributes:
        first: number of the sample's first audio sample. stop: behind the last one that lies in the clip.
        runs: (number of its first audio sample, how many, record as stored) of each run, in order.
        start_seconds: stream time of the first audio sample.
    """

    clip_key: str
    first: int
    stop: int
    runs: tuple[tuple[int, int, bytes], ...]
    start_seconds: float


class SoundRows:
    """The sound columns of a loader's rows, by row.

    Attributes:
        rate: samples a second. channels: of every sample. start_pts: of each row's video, where its sound begins,
        whatever grid its frames are on.
    """

    def __init__(self, table: pa.Table) -> None:
        kinds = set(zip(table["audio_rate"].to_pylist(), table["audio_channels"].to_pylist(), strict=True))
        self.rate, self.channels = kinds.pop()
        self.t1_pts, self.start_pts = (table[name].to_numpy() for name in ("t1_pts", "start_pts"))
        column = table["audio"].combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        self._starts = column.offsets.to_numpy()
        names = [*BlobRef._fields, "first", "count"]
        self._refs = np.stack([np.asarray(column.values.field(name), np.int64) for name in names], axis=1)

    def refs(self, row: int, first: int, stop: int) -> list[tuple[BlobRef, int, int]]:
        """(place, first sample, count) of the runs that share a sample with [first, stop)."""
        mine = self._refs[self._starts[row] : self._starts[row + 1]].tolist()
        return [(BlobRef(*ref[:4]), ref[4], ref[5]) for ref in mine if ref[4] < stop and ref[4] + ref[5] > first]


def check_audio(names: Sequence[str], version: str) -> None:
    """Raises LoaderError where a version's columns name no sound."""
    if any(name not in names for name in COLUMNS):
        raise LoaderError(
            f"audio=True: version {version} has no audio; add the audio stage to the recipe and publish a new version"
        )


class SoundReader:
    """Reads and decodes the sound that goes with frames.

    Args:
        rows: of the version. parts: URIs of the audio table's parts. frame_seconds: from one frame of a sample to the
            next.
    """

    def __init__(
        self, rows: SoundRows, parts: Sequence[str], storage_options: dict[str, str] | None, *, frame_seconds: Fraction
    ) -> None:
        self._rows = rows
        self._reader = ClipReader(parts, storage_options, what="audio")
        self._frame_seconds = frame_seconds

    @classmethod
    def of(cls, version: VersionSource, rows: VersionRows, sampling: Sampling) -> SoundReader | None:
        """The reader of a loader that has chosen its rows; None if their sound was not asked for."""
        if rows.sound is None:
            return None
        ints, ratio, row = rows.ints, sampling.ratio, int(sampling.kept[0])  # all clips have one rate, see `sampling`
        rate = Fraction(int(ints["cache_fps_num"][row]), int(ints["cache_fps_den"][row]))
        step = Fraction(int(ratio[0][row]), int(ratio[1][row])) / rate
        return cls(rows.sound, version.tables.get("audio", []), version.storage_options, frame_seconds=step)

    def num_samples(self, num_frames: int) -> int:
        """N: audio samples as long as T frames."""
        return round_half_up(num_frames * self._frame_seconds * self._rows.rate)

    def read(self, rows: Sequence[int], clips: Sequence[EncodedClip], refs: Sequence[ClipRef]) -> list[ClipSound]:
        """The bytes of samples' sound, each record whole.

        Args:
            rows: the samples' rows. clips: their frames. refs: where those lie.

        Raises:
            BadSample, SystemFailure: as `ClipReader.read`.
        """
        spans, wanted = [], []
        for row, clip, ref in zip(rows, clips, refs, strict=True):
            time_base, begin = ref.grid.time_base, int(self._rows.start_pts[row])
            per_pts = time_base * self._rows.rate
            first = _nearest((clip.pts[0] - begin) * per_pts)
            end = math.ceil((int(self._rows.t1_pts[row]) - begin) * per_pts)
            stop = min(first + self.num_samples(len(clip.pts)), end)
            start = begin * time_base + Fraction(first, self._rows.rate)
            spans.append((first, stop, float(start)))
            wanted.append(self._rows.refs(int(row), first, stop))
        asked = [ClipRef(c.clip_key, tuple(p for p, _, _ in w), r.grid, 0, 0)
                 for c, w, r in zip(clips, wanted, refs, strict=True)]  # fmt: skip
        found = self._reader.read_ranges(asked) if any(wanted) else [[] for _ in asked]
        return [
            ClipSound(c.clip_key, a, b, tuple((f, n, d) for (_, f, n), d in zip(w, data, strict=True)), seconds)
            for c, (a, b, seconds), w, data in zip(clips, spans, wanted, found, strict=True)
        ]

    def decode(self, sounds: Sequence[ClipSound], *, num_frames: int) -> dict[str, np.ndarray]:
        """``audio`` float32 (n, C, N), ``audio_valid`` bool (n, N), ``audio_start_seconds`` float64 (n,).

        Raises:
            BadSample: a record fails its CRC, does not decode, or is not what the version says; the clip is named.
        """
        shape = (len(sounds), self._rows.channels, self.num_samples(num_frames))
        audio, valid = np.zeros(shape, np.float32), np.zeros((shape[0], shape[2]), bool)
        for i, sound in enumerate(sounds):
            for first, count, data in sound.runs:
                samples = self._run(sound.clip_key, first, count, data)
                low, high = max(first, sound.first), min(first + count, sound.stop)
                span = slice(low - sound.first, high - sound.first)
                audio[i, :, span] = samples[:, low - first : high - first]
                valid[i, span] = True
        starts = np.array([s.start_seconds for s in sounds], np.float64)
        return {"audio": audio, "audio_valid": valid, "audio_start_seconds": starts}

    def _run(self, clip_key: str, first: int, count: int, data: bytes) -> Any:
        try:
            (record,) = iter_records(data)
            samples, rate = decode_run(record.payload)
        except (BadSample, ValueError) as e:
            raise BadSample(f"clip {clip_key}: its sound from sample {first} on: {e}") from e
        if (record.pts, samples.shape, rate) != (first, (self._rows.channels, count), self._rows.rate):
            raise BadSample(f"clip {clip_key}: its sound from sample {first} on is not what the version says")
        return samples


def _nearest(x: Fraction) -> int:
    return int((2 * x + 1) // 2)
