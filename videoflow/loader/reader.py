"""From references to encoded frames: byte ranges out of the frame cache, proved by their CRCs, picked by grid index.

Trainers and stages that work on cached frames (embed) read through here, so nothing in this file knows the Loader. One
Lance call reads the ranges of many clips; it fails as a whole if one row is missing, so after a failure each clip is
read alone, and the one that is damaged for good is named. What storage fails to give for other reasons is asked for
again, then stops the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import lance
import numpy as np

from videoflow.errors import BadSample, SystemFailure
from videoflow.persist import TRIES, WAIT_SECONDS, storage_failure, told
from videoflow.store.blobs import Record, iter_records
from videoflow.store.damage import is_panic
from videoflow.timeline import Grid


class VersionSource(Protocol):
    """What a loader needs of a dataset version; ``videoflow.dataset.version`` gives it."""

    @property
    def id(self) -> str:
        """``name@n``."""

    @property
    def digest(self) -> str:
        """Digest of the version's content."""

    @property
    def clips_uri(self) -> str:
        """URI of ``clips.lance``."""

    @property
    def tables(self) -> dict[str, list[str]]:
        """URIs of the parts of ``"frames"`` and, if there are any, ``"embeddings"``."""

    @property
    def storage_options(self) -> dict[str, str] | None:
        """For Lance."""


class BlobRef(NamedTuple):
    """A byte range of whole frame records: ``part`` numbers the frames table's parts."""

    part: int
    row_id: int
    offset: int
    length: int


@dataclass(frozen=True)
class ClipRef:
    """Where a clip's frames lie: refs in order of time, the grid of its cache, and the size of its cached pictures."""

    clip_key: str
    refs: tuple[BlobRef, ...]
    grid: Grid
    height: int
    width: int


@dataclass(frozen=True)
class EncodedClip:
    """T encoded frames of one clip, checked by CRC, in order of time; a frame may stand in it more than once.

    Attributes:
        clip_key: 32 hex characters.
        pts: (T,) in ``time_base`` units: the pts of the frame itself, not of the grid time it was picked for.
        payloads: (T,) encoded pictures.
        frame_valid: (T,) False where the last frame is repeated because the clip has no more.
        time_base: seconds a pts unit.
        height, width: of the cached pictures, pixels.
    """

    clip_key: str
    pts: tuple[int, ...]
    payloads: tuple[memoryview, ...]
    frame_valid: tuple[bool, ...]
    time_base: Fraction
    height: int
    width: int

    @property
    def pts_seconds(self) -> np.ndarray:
        """Stream time of the frames: float64 (T,), each the nearest to the exact value."""
        num, den = self.time_base.numerator, self.time_base.denominator
        return np.array([p * num / den for p in self.pts], dtype=np.float64)


class PartSet:
    """The parts of one artifact table, each opened when first read. Safe to use from several threads."""

    def __init__(self, uris: Sequence[str], storage_options: dict[str, str] | None = None) -> None:
        self._uris = list(uris)
        self._options = storage_options
        self._open: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"PartSet({len(self._uris)} parts)"

    def __getitem__(self, part: int) -> Any:
        """The Lance dataset of a part.

        Raises:
            BadSample: the version has no such part.
            SystemFailure: it cannot be opened.
        """
        if not 0 <= part < len(self._uris):
            raise BadSample(f"part {part} of a table with {len(self._uris)} parts")
        with self._lock:
            if part not in self._open:
                uri = self._uris[part]
                self._open[part] = _persist(lambda: lance.dataset(uri, storage_options=self._options), f"open {uri}")
            return self._open[part]

    def take(self, part: int, row_ids: Sequence[int], columns: Sequence[str]) -> Any:
        """Rows by stable id as an Arrow table. Missing ids are left out by Lance without a word: ask for the key and
        compare.

        Raises:
            SystemFailure: storage fails again and again.
        """
        dataset = self[part]
        return _persist(
            lambda: dataset._take_rows(list(row_ids), columns=list(columns)), f"read rows of {self._uris[part]}"
        )


def _persist(work: Callable[[], Any], what: str) -> Any:
    for i in range(1, TRIES + 1):
        try:
            return work()
        except BaseException as e:  # Lance raises OSError, ValueError, RuntimeError and panics for the same faults
            if not isinstance(e, Exception) and not is_panic(e):
                raise
            if i == TRIES:
                raise storage_failure(f"cannot {what}, tried {TRIES} times", e) from e
        time.sleep(WAIT_SECONDS * i)


class ClipReader:
    """Reads the encoded frames of clips.

    Args:
        frames_parts: URIs of the parts of the frames table, in the order that references number them.
        storage_options: for Lance.
        what: the table, for an error's message.
    """

    def __init__(
        self, frames_parts: Sequence[str], storage_options: dict[str, str] | None = None, *, what: str = "frames"
    ) -> None:
        self._parts = PartSet(frames_parts, storage_options)
        self._what = what

    def __repr__(self) -> str:
        return f"ClipReader({self._parts!r})"

    def read(
        self, clips: Sequence[ClipRef], wanted: Sequence[Sequence[int]], *, num_frames: int | None = None
    ) -> list[EncodedClip]:
        """Frames of clips at the wanted grid indices.

        Args:
            clips: where the clips lie.
            wanted: for each clip the grid indices, ascending; at least one.
            num_frames: T of every result; clips with fewer wanted indices repeat their last frame as not valid. None:
                as wanted.

        Raises:
            BadSample: a clip's row is gone, a record fails its CRC, or no frame is there for a grid index; the clip is
            named. SystemFailure: storage fails again and again.
        """
        ranges = self.read_ranges(clips)
        return [self._pick(c, r, w, num_frames) for c, r, w in zip(clips, ranges, wanted, strict=True)]

    def read_ranges(self, clips: Sequence[ClipRef]) -> list[list[bytes]]:
        """The bytes of every reference of some clips, not looked at.

        Raises:
            BadSample: a row is gone or does not hold them; the clip is named. SystemFailure: storage fails.
        """
        requests: dict[int, list[tuple[int, int, BlobRef]]] = {}
        for i, clip in enumerate(clips):
            for j, ref in enumerate(clip.refs):
                requests.setdefault(ref.part, []).append((i, j, ref))
        ranges: list[list[bytes]] = [[b""] * len(clip.refs) for clip in clips]
        try:
            for part, asked in requests.items():
                for (i, j, _), data in zip(asked, self._call(part, [ref for _, _, ref in asked]), strict=True):
                    ranges[i][j] = data
        except BaseException as e:  # whatever it was: reading clip by clip finds out, and names the clip
            if not isinstance(e, Exception) and not is_panic(e):
                raise
            return [[self._read_one(clip, ref) for ref in clip.refs] for clip in clips]
        return ranges

    def _call(self, part: int, refs: Sequence[BlobRef]) -> list[bytes]:
        found = self._parts[part].read_blob_ranges(
            "data", [(r.row_id, r.offset, r.length) for r in refs], selector="ids"
        )
        if any(data is None for _, _, data in found):
            raise BadSample(f"a row of {self._what} holds no data")
        return [data for _, _, data in found]

    def _read_one(self, clip: ClipRef, ref: BlobRef) -> bytes:
        """One range, with retries; what is wrong with it for good becomes a BadSample."""
        for i in range(1, TRIES + 1):
            try:
                return self._call(ref.part, [ref])[0]
            except BadSample as e:
                raise BadSample(f"clip {clip.clip_key}: {e} (part {ref.part}, row {ref.row_id})") from e
            except SystemFailure:
                raise
            except BaseException as e:
                if not isinstance(e, Exception) and not is_panic(e):
                    raise
                self._raise_if_permanent(clip, ref, e)
                if i == TRIES:
                    raise storage_failure(f"cannot read clip {clip.clip_key}, tried {TRIES} times", e) from e
            time.sleep(WAIT_SECONDS * i)
        raise AssertionError("unreachable")

    def _raise_if_permanent(self, clip: ClipRef, ref: BlobRef, error: BaseException) -> None:
        where = f"clip {clip.clip_key}: its {self._what} row (part {ref.part}, row {ref.row_id})"
        if self._parts.take(ref.part, [ref.row_id], ["item_key"]).num_rows == 0:
            raise BadSample(f"{where} is gone") from error
        if isinstance(error, ValueError) or "fill whole buffer" in str(
            error
        ):  # a blob file cut short, or Lance's "invalid user input": the range does not fit the blob
            raise BadSample(f"{where} does not hold bytes {ref.offset}+{ref.length}: {told(error)}") from error

    def _pick(self, clip: ClipRef, ranges: list[bytes], wanted: Sequence[int], num_frames: int | None) -> EncodedClip:
        try:
            records = [record for data in ranges for record in iter_records(data)]
        except BadSample as e:
            raise BadSample(f"clip {clip.clip_key}: {e}") from e
        picked = _pick_records(clip, records, [int(k) for k in wanted])
        num_padded = max(0, (num_frames or 0) - len(picked))
        frames = picked + picked[-1:] * num_padded
        return EncodedClip(
            clip_key=clip.clip_key,
            pts=tuple(r.pts for r in frames),
            payloads=tuple(r.payload for r in frames),
            frame_valid=(True,) * len(picked) + (False,) * num_padded,
            time_base=clip.grid.time_base,
            height=clip.height,
            width=clip.width,
        )


def _pick_records(clip: ClipRef, records: list[Record], wanted: Sequence[int]) -> list[Record]:
    records.sort(key=lambda r: r.pts)
    positions = clip.grid.frame_positions([r.pts for r in records], wanted)
    if not positions or min(positions) < 0:
        missing = [k for k, p in zip(wanted, positions, strict=True) if p < 0]
        raise BadSample(
            f"clip {clip.clip_key}: its {len(records)} cached frames hold none for grid index "
            f"{missing[0] if missing else '(none asked)'}"
        )
    return [records[p] for p in positions]
