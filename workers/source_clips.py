"""Units of SourceStages: chosen clips of whole videos, decoded once in the sandbox, written in the order of a hash.

A unit holds whole videos, so that clips which share a group of pictures share its decoding; its rows are sorted by
hash(clip_key) before they are written, so that a block read from beginning to end is shuffled already
(docs/decisions/0017).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lance
import pyarrow as pa

from videoflow.errors import MediaError, SystemFailure
from videoflow.keys import clip_order
from videoflow.media.decoder import is_damaged
from videoflow.persist import HostWatch
from videoflow.stage import ClipMaker, PassConsumer, Product, ShownFrame, SourceClip, SourceStage, Stage
from videoflow.store.ledger import FILTERED, QUARANTINED, ItemResult
from videoflow.store.reader import rows_of
from videoflow.telemetry.meter import count
from videoflow.unit import ChosenClip, SourceItem, Unit, UnitReport
from workers.fetch import fetched
from workers.intervals import IntervalReader, VideoFacts, merged
from workers.sandbox import Heartbeat, Sandbox, Spool, clock, set_up, spool_folder
from workers.write_unit import head_columns, quarantined, stage_rows

#: Columns of the videos table that `VideoFacts` are made of.
_FACTS = (
    *("stream", "tb_num", "tb_den", "pts", "end_pts", "damage"),
    *("width", "height", "sar_num", "sar_den", "rotation", "mirrored"),
)


@dataclass(frozen=True)
class ClipOutcome:
    """What came of one clip: its row's number in the spool file (None: it has none), digest, and why not."""

    row: int | None = None
    digest: str = ""
    filtered: str | None = None
    failure: MediaError | None = None


@dataclass(frozen=True)
class TakenClips:
    """What came of one video: an outcome a clip, in order; the spool file; what was decoded."""

    outcomes: list[ClipOutcome]
    path: str
    stream: int
    intervals: int = 0
    from_start: int = 0
    frames: int = 0


def run_source_clips(
    unit: Unit, stage: SourceStage, sandbox: Sandbox, hosts: HostWatch, check: Callable[[], None]
) -> UnitReport:
    """Run a unit of SourceItems. ``check`` raises when the job is stopping."""
    fp = unit.works[0].fingerprint
    rows = _facts_of(unit)
    taken: list[TakenClips | MediaError] = []
    with spool_folder() as folder:
        for item in unit.items:
            check()
            assert isinstance(item, SourceItem)
            try:
                with fetched(item.video, hosts) as path:
                    count(bytes_read=item.video.size)
                    task = (path, item, rows[item.probe_key], [(fp, stage)], folder)
                    taken.append(sandbox.run(_take_in_child, *task, riders=[stage.name]))
            except MediaError as e:
                check()  # a killed child looks like a crash
                taken.append(e)
        return _written(unit, taken)


def _facts_of(unit: Unit) -> dict[str, dict[str, Any]]:
    keys = {item.probe_key for item in unit.items}
    found = {r["item_key"]: r for r in rows_of(unit.root, unit.tables["probe"], keys, columns=_FACTS).to_pylist()}
    if lost := keys - found.keys():
        raise SystemFailure(f"the videos table has lost {len(lost)} rows; remove its folder and run again")
    return found


# -- in the child ----------------------------------------------------------------------------------------------------


def _take_in_child(
    path: str, item: SourceItem, row: dict[str, Any], works: list[tuple[str, Any]], folder: str
) -> TakenClips:
    facts = VideoFacts.of(row)
    (stage,) = set_up(works)
    assert isinstance(stage, SourceStage)
    spool = Spool(folder, item.video.video_key, [stage])
    taker = ClipsTaker(stage, item, facts)
    riding, beat = clock().ride([_Riding(taker), Heartbeat()])
    sink = clock().sink(spool.add)
    reader = IntervalReader(path, facts, beat=lambda: beat.see(None))  # type: ignore[arg-type]
    try:
        with clock().passing():
            for shown in reader.frames(taker.spans):
                for made in riding.see(shown) or ():
                    sink(stage.name, made)
    finally:
        spool.close()
    counts = (reader.intervals, reader.from_start, reader.frames_decoded)
    return TakenClips(taker.outcomes, spool.paths[stage.name], facts.stream, *counts)


@dataclass
class _Clip:
    """A clip on its way: frames [first, stop) of the video are its own, ``wanted`` of them its stage's."""

    number: int
    clip: SourceClip
    first: int
    stop: int
    wanted: frozenset[int]
    maker: ClipMaker | None = None


@dataclass
class ClipsTaker:
    """Hands every shown frame to the clips that want it, and their products over as soon as they are complete.

    Attributes:
        outcomes: one a clip, in the item's order. spans: ranges of frames to be shown, merged.
    """

    stage: SourceStage
    item: SourceItem
    facts: VideoFacts
    outcomes: list[ClipOutcome] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outcomes = [ClipOutcome(filtered="no_payload_frame")] * len(self.item.clips)
        found = (self._clip(n, c) for n, c in enumerate(self.item.clips))
        self._coming = sorted((c for c in found if c is not None), key=lambda c: (c.first, c.stop), reverse=True)
        self.spans = merged([(c.first, c.stop) for c in self._coming])
        self._open: list[_Clip] = []
        self._rows = 0

    def _clip(self, number: int, chosen: ChosenClip) -> _Clip | None:
        f = self.facts
        first, stop = bisect_left(f.pts, chosen.t0_pts), bisect_left(f.pts, chosen.t1_pts)
        span = (chosen.t0_pts, chosen.t1_pts)
        clip = SourceClip(
            chosen.clip_key, self.item.video.video_key, f.stream, f.time_base, f.pts[0], *span, f.pts[first:stop]
        )
        wanted = self.stage.wanted(clip) if first < stop else ()
        if any(is_damaged(p, f.damage) for p in wanted):
            self.outcomes[number] = ClipOutcome(filtered="damaged")
            return None
        return _Clip(number, clip, first, stop, frozenset(wanted)) if wanted else None

    def see(self, frame: ShownFrame) -> Iterator[dict[str, Any]]:
        """Show a frame; the rows of clips that end with it."""
        while self._coming and self._coming[-1].first <= frame.index:
            opened = self._coming.pop()
            opened.maker = self.stage.open(opened.clip)
            self._open.append(opened)
        for clip in list(self._open):
            try:
                if frame.pts in clip.wanted and clip.maker is not None:
                    clip.maker.see(frame)
                if frame.index + 1 == clip.stop and clip.maker is not None:
                    self._open.remove(clip)
                    yield from self._finished(clip.number, clip.maker.finish())
            except MediaError as e:
                self.outcomes[clip.number] = ClipOutcome(failure=e)
                if clip in self._open:
                    self._open.remove(clip)

    def _finished(self, number: int, product: Product) -> Iterator[dict[str, Any]]:
        if product.filtered:
            self.outcomes[number] = ClipOutcome(filtered=product.filtered)
            return
        (row,) = product.rows
        self.outcomes[number] = ClipOutcome(self._rows, product.digest)
        self._rows += 1
        yield dict(row)


class _Riding(PassConsumer):
    """A taker as the clock of a pass knows its riders."""

    name, version, table = "clips", 1, ""

    def __init__(self, taker: ClipsTaker) -> None:
        super().__init__()
        self._taker = taker

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def begin(self, video: object) -> None: ...

    def see(self, frame: ShownFrame) -> Iterator[dict[str, Any]]:
        return self._taker.see(frame)

    def finish(self, summary: object) -> Product:
        return Product()


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """Where a row lies until it is written."""

    order: str
    path: str
    number: int
    result: ItemResult
    stream: int


def _written(unit: Unit, taken: Sequence[TakenClips | MediaError]) -> UnitReport:
    work = unit.works[0]
    results: list[ItemResult] = []
    rows: list[_Row] = []
    for item, found in zip(unit.items, taken, strict=True):
        for n, chosen in enumerate(item.clips):
            outcome = ClipOutcome(failure=found) if isinstance(found, MediaError) else found.outcomes[n]
            result = _result(item, chosen, outcome)
            results.append(result)
            if outcome.row is not None and isinstance(found, TakenClips):
                rows.append(_Row(clip_order(chosen.clip_key), found.path, outcome.row, result, found.stream))
    rows.sort(key=lambda r: r.order)
    record = stage_rows(unit, work, results, lambda: _batches(work.stage, rows))
    done = [t for t in taken if isinstance(t, TakenClips)]
    return UnitReport(
        (record,),
        items=len(results),
        quarantined=sum(r.state == QUARANTINED for r in results),
        decoded_intervals=sum(t.intervals for t in done),
        intervals_from_start=sum(t.from_start for t in done),
    )


def _result(item: SourceItem, chosen: ChosenClip, outcome: ClipOutcome) -> ItemResult:
    video = item.video.video_key
    if outcome.failure is not None:
        return quarantined(chosen.item_key, video, chosen.input_digest, outcome.failure)
    if outcome.filtered:
        return ItemResult(chosen.item_key, video, chosen.input_digest, state=FILTERED, reason=outcome.filtered)
    return ItemResult(chosen.item_key, video, chosen.input_digest, outcome.digest, 1)


def _batches(stage: Stage, rows: Sequence[_Row]) -> Iterator[pa.RecordBatch]:
    """Rows out of the spool files one by one, completed."""
    schema = stage.schema()
    readers: dict[str, Any] = {}
    for row in rows:
        if row.path not in readers:
            readers[row.path] = pa.ipc.open_file(pa.OSFile(row.path))
        batch = readers[row.path].get_batch(row.number)
        columns: dict[str, pa.Array] = {name: batch.column(name) for name in batch.schema.names}
        for name, value in head_columns(row.result, row.stream).items():
            columns[name] = pa.array([value], schema.field(name).type)
        for f in schema:
            if isinstance(f.type, pa.ExtensionType):
                columns[f.name] = lance.blob_array([v.as_py() for v in columns[f.name]])
        yield pa.RecordBatch.from_arrays([columns[f.name] for f in schema], schema=schema)
