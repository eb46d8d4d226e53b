"""Units of long videos: find where one can be cut, decode one part, join the parts. See workers/parts.py.

A part's rows are written by whoever decodes it and belong to no table until the joined record is committed; a job
that is killed before leaves orphans for `gc`, and the video whole as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from videoflow.errors import MediaError
from videoflow.fingerprint import pass_item_key
from videoflow.persist import HostWatch
from videoflow.stage import Margin, PassConsumer, Stage
from videoflow.store.commit import UnitRecord
from videoflow.store.ledger import DONE, ItemResult
from videoflow.store.writer import write_rows
from videoflow.telemetry.meter import counted, span
from videoflow.unit import JoinItem, PartItem, PartResult, SplitItem, StageWork, Unit, UnitReport, VideoPart
from workers.decode import Opener
from workers.fetch import fetched
from workers.nvdec import by_decoder, decoder_of
from workers.parts import DecodedPart, Unfit, decode_part, find_parts, joined, joined_probe, widest
from workers.sandbox import DecodedVideo, Heartbeat, Sandbox, Spool, clock, set_up, spool_folder
from workers.write_unit import batches_of, head_columns, spooled, stage_rows

PROBE = "probe"


def run_long(unit: Unit, sandbox: Sandbox, hosts: HostWatch, check: Callable[[], None]) -> UnitReport:
    """Run a unit of SplitItems, PartItems or JoinItems. ``check`` raises when the job is stopping."""
    report = UnitReport((), 0)
    with spool_folder() as folder:
        for item in unit.items:
            check()
            try:
                if isinstance(item, SplitItem):
                    found = _find(unit, item, sandbox, hosts, folder)
                    report.splits[item.video.video_key] = found
                elif isinstance(item, PartItem):
                    part, left = _part(unit, item, sandbox, hosts, folder)
                    parts, num_frames = (*report.parts, part), len(part.pts)
                    report = UnitReport((), 1, frames_decoded=num_frames, parts=parts, left_to_cpu=left)
                else:
                    records = _join(unit, item)
                    report = UnitReport((*report.records, *records), report.items + 1, decoded_videos=report.items + 1)
            except (Unfit, MediaError) as e:  # the whole video's own pass says what is wrong with it
                check()
                report.unfit[item.video.video_key] = str(e)
    return report


def _works(unit: Unit) -> list[tuple[str, PassConsumer]]:
    return [(w.fingerprint, w.stage) for w in unit.works if isinstance(w.stage, PassConsumer)]


def _margin(consumers: Sequence[PassConsumer]) -> Margin:
    margin = widest(consumers)
    if margin is None:
        raise Unfit("a stage must see it whole")
    return margin


# -- where to cut ----------------------------------------------------------------------------------------------------


def _find(unit: Unit, item: SplitItem, sandbox: Sandbox, hosts: HostWatch, folder: str) -> tuple[VideoPart, ...]:
    with fetched(item.video, hosts) as path:
        task = (path, unit.stream, _margin([stage for _, stage in _works(unit)]), item, folder)
        found: tuple[VideoPart, ...] = sandbox.run(_find_in_child, *task)
        return found


def _find_in_child(
    path: str, stream: int | None, margin: Margin, item: SplitItem, folder: str
) -> tuple[VideoPart, ...]:
    return find_parts(path, stream=stream, margin=margin, most=item.most, min_seconds=item.min_seconds)


# -- one part --------------------------------------------------------------------------------------------------------


def _part(
    unit: Unit, item: PartItem, sandbox: Sandbox, hosts: HostWatch, folder: str
) -> tuple[PartResult, dict[str, str]]:
    video, number = item.video.video_key, item.part.number
    works = _works(unit)
    with fetched(item.video, hosts) as path:
        task = (path, item, unit.stream, works, folder)
        decoded, spool = sandbox.run(_decode_in_child, *task, riders=[stage.name for _, stage in works])
    written: dict[str, tuple[str, ...]] = {}
    for work in unit.works:
        name = work.stage.name
        result = ItemResult(pass_item_key(video, unit.stream, work.fingerprint), video, video, rows=spool.rows[name])
        with span("write"):
            fragments = write_rows(
                unit.root,
                work.target,
                work.stage.schema(),
                partial(_rows_of, work.stage, result, spool),
                expected=result.rows,
            )
        written[name] = tuple(fragments)
    made = PartResult(
        video,
        number,
        decoded.stream,
        decoded.columns,
        decoded.pts,
        decoded.end_pts,
        decoded.extras,
        written,
        spool.rows,
    )
    return made, {video: spool.left_to_cpu} if spool.left_to_cpu else {}


def _rows_of(stage: Stage, result: ItemResult, spool: DecodedVideo) -> Iterator[pa.RecordBatch]:
    return counted(spooled(stage, result, spool))


def _decode_in_child(
    path: str, item: PartItem, stream: int | None, works: list[tuple[str, PassConsumer]], folder: str
) -> tuple[DecodedPart, DecodedVideo]:
    consumers = set_up(works)
    task = partial(_decode_part, path=path, item=item, stream=stream, consumers=consumers, folder=folder)
    (decoded, rows), why = by_decoder(decoder_of(consumers), path, stream, task)
    return decoded, replace(rows, left_to_cpu=why)


def _decode_part(
    opener: Opener, *, path: str, item: PartItem, stream: int | None, consumers: list[PassConsumer], folder: str
) -> tuple[DecodedPart, DecodedVideo]:
    video_key = item.video.video_key
    spool = Spool(folder, f"{video_key}-{item.part.number}", consumers)
    try:
        with clock().passing():
            decoded = decode_part(
                path,
                video_key=video_key,
                part=item.part,
                margin=_margin(consumers),
                consumers=clock().ride([*consumers, Heartbeat()]),
                sink=clock().sink(spool.add),
                stream=stream,
                opener=opener,
            )
    finally:
        spool.close()
    rows = DecodedVideo(decoded.stream, len(decoded.pts), (), {}, {}, spool.paths, spool.rows)
    return decoded, rows


# -- together --------------------------------------------------------------------------------------------------------


def _join(unit: Unit, item: JoinItem) -> list[UnitRecord]:
    row, probe_digest, _ = joined_probe(item.parts)
    made: list[tuple[StageWork, ItemResult, list[dict[str, Any]]]] = []
    for work in unit.works:
        assert isinstance(work.stage, PassConsumer)
        name = work.stage.name
        if name == PROBE:
            rows, key = [row], probe_digest
        else:
            product = joined(work.stage, item.parts)
            rows, key = [dict(r) for r in product.rows], product.digest
        video = item.video.video_key
        num_rows = sum(p.rows[name] for p in item.parts) + len(rows)
        result = ItemResult(pass_item_key(video, unit.stream, work.fingerprint), video, video, key, num_rows, DONE)
        head = head_columns(result, item.parts[0].stream)
        made.append((work, result, [{**head, **r} for r in rows]))
    return [
        stage_rows(
            unit,
            work,
            [result],
            partial(batches_of, work.stage.schema(), rows),
            written=[f for p in item.parts for f in p.fragments[work.stage.name]],
            num_written=sum(p.rows[work.stage.name] for p in item.parts),
        )
        for work, result, rows in made
    ]
