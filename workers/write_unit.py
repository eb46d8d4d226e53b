"""Writing a unit down: rows as fragments of their tables, how each item ended, and the staged record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa

from videoflow.errors import MediaError
from videoflow.stage import Stage
from videoflow.store.commit import UnitRecord, stage_unit, unit_id
from videoflow.store.ledger import QUARANTINED, ItemResult
from videoflow.store.writer import open_target, write_rows
from videoflow.telemetry.meter import counted, metered
from videoflow.unit import StageWork, Unit
from workers.sandbox import DecodedVideo

BATCH_ROWS = 256


@metered("write")
def stage_rows(
    unit: Unit,
    work: StageWork,
    results: Sequence[ItemResult],
    batches: Callable[[], Iterator[pa.RecordBatch]],
    *,
    written: Sequence[str] = (),
    num_written: int = 0,
) -> UnitRecord:
    """Write a stage's rows and stage the record. ``written``: fragments that hold rows of these items already, in the
    part of the table that the unit names. ``batches`` gives the rows, from their beginning each time it is called.
    """
    target = work.target if written else open_target(unit.root, work.target)
    expected = sum(r.rows for r in results) - num_written
    counting = _counting(batches)
    fragments = write_rows(unit.root, target, work.stage.schema(), counting, expected=expected)
    name = unit_id(target.stage, work.fingerprint, (r.item_key for r in results))
    record = UnitRecord(name, target, tuple(results), (*written, *fragments), unit.job)
    return stage_unit(unit.root, record)


def _counting(batches: Callable[[], Iterator[pa.RecordBatch]]) -> Callable[[], Iterator[pa.RecordBatch]]:
    return lambda: counted(batches())


def batches_of(schema: pa.Schema, rows: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(rows), BATCH_ROWS):
        yield pa.RecordBatch.from_pylist(rows[at : at + BATCH_ROWS], schema=schema)


def quarantined(key: str, video_key: str, input_digest: str, e: MediaError) -> ItemResult:
    return ItemResult(key, video_key, input_digest, state=QUARANTINED, reason=e.code, message=e.message)


def head_columns(result: ItemResult, stream: int) -> dict[str, Any]:
    return {
        "item_key": result.item_key,
        "input_digest": result.input_digest,
        "video_key": result.video_key,
        "stream": stream,
    }


def spooled(stage: Stage, result: ItemResult, video: DecodedVideo) -> Iterator[pa.RecordBatch]:
    """A video's rows from its spool file, completed: head columns, damage of each chunk, blobs as blobs."""
    schema = stage.schema()
    with pa.OSFile(video.files[stage.name]) as source:  # a mapped file would count as memory until it is closed
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            columns: dict[str, pa.Array] = {name: batch.column(name) for name in batch.schema.names}
            for name, value in head_columns(result, video.stream).items():
                columns[name] = pa.array([value] * len(batch), schema.field(name).type)
            if "damage" in columns and "pts" in columns and stage.name == "frames":
                columns["damage"] = _chunk_damage(columns["pts"], result.damage, schema.field("damage").type)
            for f in schema:
                if isinstance(f.type, pa.ExtensionType):
                    columns[f.name] = lance.blob_array([v.as_py() for v in columns[f.name]])
            yield pa.RecordBatch.from_arrays([columns[f.name] for f in schema], schema=schema)


def _chunk_damage(pts: pa.Array, damage: tuple[tuple[int, int], ...], kind: pa.DataType) -> pa.Array:
    rows = []
    for own in pts.to_pylist():
        rows.append([{"t0_pts": a, "t1_pts": b} for a, b in damage if any(a <= p < b for p in own)])
    return pa.array(rows, kind)
