"""Runs one unit: the same code under every engine. Computes its items, writes one fragment per stage, stages the
record.

Whatever is wrong with an item ends in that item's result; whatever is wrong with the system is raised and stops the
job.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from videoflow.errors import BadSample, MediaError, first_line
from videoflow.fingerprint import pass_item_key
from videoflow.loader.payload import PayloadEngine, PayloadReader
from videoflow.loader.reader import ClipReader
from videoflow.persist import HostWatch
from videoflow.stage import ClipFrames, ClipStage, Item, PassConsumer, Product, SourceStage, Stage, VideoStage
from videoflow.store.commit import UnitRecord
from videoflow.store.ledger import DONE, FILTERED, QUARANTINED, ItemResult
from videoflow.store.reader import rows_of
from videoflow.telemetry.meter import count, metered
from videoflow.unit import ClipItem, DecodeItem, JoinItem, PartItem, RowsItem, SplitItem, StageWork, Unit, UnitReport
from workers.blobs import Blobs
from workers.fetch import fetched
from workers.read_ahead import ReadAhead
from workers.run_parts import run_long
from workers.sandbox import DecodedVideo, Sandbox, spool_folder
from workers.source_clips import run_source_clips
from workers.write_unit import batches_of, head_columns, quarantined, spooled, stage_rows


class Cancelled(Exception):
    """The job is stopping; what is staged stays, the rest of this unit is done again by the next run."""


#: What a stage raises of itself, over this item or that: it costs the item, never the job.
OWN_FAILURES = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError, AttributeError)


class UnitRunner:
    """A worker: keeps its sandbox, its stages and its reader from unit to unit. Not shared between threads."""

    def __init__(self, *, decode_threads: int = 1, memory_bytes: int | None = None) -> None:
        self._sandbox = Sandbox(memory_bytes=memory_bytes)
        self._threads = decode_threads
        self._stages: dict[str, Stage] = {}
        self._engine = PayloadEngine(threads=decode_threads)  # cached frames too
        self._cancelled = False
        self._hosts = HostWatch()

    def cancel(self) -> None:
        """Called from another thread: `run` raises `Cancelled` after the item in hand, a decoding child is killed."""
        self._cancelled = True
        self._sandbox.kill()

    def _check(self) -> None:
        if self._cancelled:
            raise Cancelled

    def run(self, unit: Unit) -> UnitReport:
        """Run a unit to its staged records.

        Raises:
            SystemFailure: storage, weights, anything that no item is to blame for.
        """
        began = time.monotonic()
        kind = unit.works[0].stage
        if isinstance(unit.items[0], SplitItem | PartItem | JoinItem):
            report = run_long(unit, self._sandbox, self._hosts, self._check)
        elif isinstance(kind, PassConsumer):
            report = self._decode(unit)
        elif isinstance(kind, VideoStage):
            report = self._rows(unit, kind)
        elif isinstance(kind, SourceStage):
            report = run_source_clips(unit, kind, self._sandbox, self._hosts, self._check)
        else:
            assert isinstance(kind, ClipStage)
            report = self._clips(unit, kind)
        return replace(report, seconds=time.monotonic() - began)

    def close(self) -> None:
        self._sandbox.close()
        self._engine.close()
        for stage in self._stages.values():
            stage.teardown()
        self._stages.clear()

    @metered("start_up")
    def _live(self, work: StageWork) -> Stage:
        if work.fingerprint not in self._stages:
            live = copy.deepcopy(work.stage)  # units of one process share the description: the live stage is ours
            live.setup()
            self._stages[work.fingerprint] = live
            if "torch" in sys.modules:  # workers fill the cores; threads inside each of them would fight over them
                sys.modules["torch"].set_num_threads(self._threads)
        return self._stages[work.fingerprint]

    # -- the decode pass ---------------------------------------------------------------------------------------------

    def _decode(self, unit: Unit) -> UnitReport:
        outcomes: list[tuple[DecodeItem, DecodedVideo | MediaError]] = []
        with spool_folder() as folder:
            for item in unit.items:
                self._check()
                try:
                    outcomes.append((item, self._decode_one(unit, item, folder)))
                except MediaError as e:
                    self._check()  # a killed child looks like a crash
                    outcomes.append((item, e))
            records = tuple(self._write_pass(unit, work, outcomes) for work in unit.works)
        decoded = [d for _, d in outcomes if isinstance(d, DecodedVideo)]
        return UnitReport(
            records,
            items=len(outcomes),
            quarantined=len(outcomes) - len(decoded),
            decoded_videos=sum(item.header is None for item, _ in outcomes),
            heard_videos=sum(item.header is not None for item, _ in outcomes),
            frames_decoded=sum(d.num_frames for d in decoded),
            left_to_cpu={
                i.video_key: d.left_to_cpu for i, d in outcomes if isinstance(d, DecodedVideo) and d.left_to_cpu
            },
        )

    def _decode_one(self, unit: Unit, item: DecodeItem, folder: str) -> DecodedVideo:
        works = [(w.fingerprint, w.stage) for w in unit.works if isinstance(w.stage, PassConsumer)]
        with fetched(item, self._hosts) as path:
            count(bytes_read=item.size)
            return self._sandbox.decode(
                path, video_key=item.video_key, stream=unit.stream, works=works, folder=folder, header=item.header
            )

    def _write_pass(
        self, unit: Unit, work: StageWork, outcomes: list[tuple[DecodeItem, DecodedVideo | MediaError]]
    ) -> UnitRecord:
        results = []
        sees = isinstance(work.stage, PassConsumer) and work.stage.sees
        for item, outcome in outcomes:
            key = pass_item_key(item.video_key, unit.stream, work.fingerprint)
            failure = outcome if isinstance(outcome, MediaError) else outcome.failures.get(work.stage.name)
            if failure is not None:
                results.append(quarantined(key, item.video_key, item.video_key, failure))
                continue
            assert isinstance(outcome, DecodedVideo)
            name = work.stage.name
            results.append(
                ItemResult(
                    key,
                    item.video_key,
                    item.video_key,
                    outcome.digests[name],
                    outcome.rows[name],
                    DONE,
                    damage=outcome.damage if sees else (),
                )
            )

        def rows() -> Iterator[pa.RecordBatch]:
            for (_, outcome), result in zip(outcomes, results, strict=True):
                if result.rows and isinstance(outcome, DecodedVideo):
                    yield from spooled(work.stage, result, outcome)

        return stage_rows(unit, work, results, rows)

    # -- rows of other stages ----------------------------------------------------------------------------------------

    @metered("process")
    def _rows(self, unit: Unit, stage: VideoStage) -> UnitReport:
        work = unit.works[0]
        live = self._live(work)
        assert isinstance(live, VideoStage)
        inputs = _read_inputs(unit, live.media)
        blobs = Blobs(unit, live.media)
        results, rows = [], []
        for item in unit.items:
            self._check()
            assert isinstance(item, RowsItem)
            mine = {name: inputs[name].get(key, []) for name, key in item.inputs.items()}
            try:
                blobs_of = blobs.of(item.video_key, mine)
                product = live.process(Item(item.video_key, mine, item.intervals, blobs_of, *_told(item)))
            except MediaError as e:
                results.append(quarantined(item.item_key, item.video_key, item.input_digest, e))
                continue
            except OWN_FAILURES as e:
                failure = MediaError("model_error", f"{type(e).__name__}: {first_line(e)}")
                results.append(quarantined(item.item_key, item.video_key, item.input_digest, failure))
                continue
            result = _result(item, product)
            results.append(result)
            stream = next((r["stream"] for found in mine.values() for r in found), -1)
            rows += [{**head_columns(result, stream), **row} for row in product.rows if result.rows]
        record = stage_rows(unit, work, results, lambda: batches_of(work.stage.schema(), rows))
        return _report(record)

    # -- cached frames of clips --------------------------------------------------------------------------------------

    @metered("process")
    def _clips(self, unit: Unit, stage: ClipStage) -> UnitReport:
        work = unit.works[0]
        live = self._live(work)
        assert isinstance(live, ClipStage)
        ((name, parts),) = unit.tables.items()
        make_reader = ClipReader if name == "frames" else PayloadReader
        reader = make_reader([unit.root.uri(p) for p in parts], unit.root.lance_options())
        batches = [unit.items[at : at + live.batch_size] for at in range(0, len(unit.items), live.batch_size)]
        results, rows = [], []
        with ReadAhead(reader, self._engine) as ahead:
            for batch, frames in ahead.batches(batches):
                self._check()
                for item, product in zip(batch, self._products(live, ahead, batch, frames), strict=True):
                    if isinstance(product, MediaError):
                        results.append(quarantined(item.item_key, item.video_key, item.input_digest, product))
                        continue
                    result = _result(item, product)
                    results.append(result)
                    rows += [{**head_columns(result, item.stream), **row} for row in product.rows if result.rows]
        record = stage_rows(unit, work, results, lambda: batches_of(work.stage.schema(), rows))
        return _report(record)

    def _products(
        self, stage: ClipStage, ahead: ReadAhead, batch: Sequence[ClipItem], frames: list[ClipFrames] | BadSample
    ) -> list[Product | MediaError]:
        """One outcome a clip; a clip whose cached bytes are damaged fails alone."""
        if isinstance(frames, BadSample):
            why = "cached frames are damaged (CRC or row); recompute stage frames for this video"
            return self._alone(stage, ahead, batch, MediaError("io_error", why))
        try:
            return list(stage.process(frames))
        except MediaError as e:
            return self._alone(stage, ahead, batch, e)
        except OWN_FAILURES as e:
            return self._alone(stage, ahead, batch, MediaError("model_error", f"{type(e).__name__}: {first_line(e)}"))

    def _alone(
        self, stage: ClipStage, ahead: ReadAhead, batch: Sequence[ClipItem], failure: MediaError
    ) -> list[Product | MediaError]:
        if len(batch) == 1:
            return [failure]
        return [self._products(stage, ahead, [item], ahead.alone(item))[0] for item in batch]


def _told(item: RowsItem) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """A video's metadata, or those of its intervals where they differ."""
    return ({}, tuple(item.told)) if len(item.told) > 1 else (dict(*item.told), ())


def _result(item: RowsItem | ClipItem, product: Product) -> ItemResult:
    if product.filtered:
        return ItemResult(item.item_key, item.video_key, item.input_digest, state=FILTERED, reason=product.filtered)
    return ItemResult(item.item_key, item.video_key, item.input_digest, product.digest, len(product.rows))


def _report(record: UnitRecord) -> UnitReport:
    bad = sum(i.state == QUARANTINED for i in record.items)
    return UnitReport((record,), items=len(record.items), quarantined=bad)


@metered("read")
def _read_inputs(unit: Unit, media: Sequence[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows of the input stages for all items: by stage name, then by item key. Media columns are left out; rows of the
    inputs named in ``media`` say where they lie instead.
    """
    wanted: dict[str, set[str]] = {}
    for item in unit.items:
        for name, key in item.inputs.items():
            wanted.setdefault(name, set()).add(key)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, keys in wanted.items():
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in rows_of(unit.root, unit.tables[name], keys, with_row_ids=name in media).to_pylist():
            rows.setdefault(row["item_key"], []).append(row)
        found[name] = rows
    return found
