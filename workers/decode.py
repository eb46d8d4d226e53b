"""The decode pass: one file, decoded once, straight through; every consumer sees every shown frame.

One frame is held back until the next one's pts is known, so that each is handed over with the interval it is shown in.
Memory does not grow with the video's length: consumers hand over finished rows as they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np

from videoflow.errors import MediaError
from videoflow.media.decoder import Decoder, open_decoder
from videoflow.media.picture import Geometry, Picture, geometry_of
from videoflow.stage import PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary
from videoflow.timeline import Grid, parse_rate
from workers.hear import PassEar, hear_alone

#: Takes a consumer's finished row: (stage name, row without head columns).
Sink = Callable[[str, dict[str, Any]], None]
#: Opens a file's stream for one pass: (path, container index or None for the first).
Opener = Callable[[str | Path, int | None], AbstractContextManager[Decoder]]


@dataclass
class PassFacts:
    """What the pass itself learned; workers/probe.py turns it into the videos row."""

    stream: int = -1
    geometry: Geometry | None = None
    first: Any = None  # the first shown frame's description, see _describe
    size_changes: int = 0
    audio: list[dict[str, Any]] = field(default_factory=list)
    container: str = ""
    codec: dict[str, Any] = field(default_factory=dict)
    decoder: Decoder | None = None


@dataclass
class PassResult:
    """Products by stage name; failures of single consumers by stage name; the summary all of them were given."""

    summary: VideoSummary
    facts: PassFacts
    products: dict[str, Product]
    failures: dict[str, MediaError]


def run_pass(
    path: str | Path,
    *,
    video_key: str,
    consumers: Sequence[PassConsumer],
    sink: Sink,
    stream: int | None = None,
    opener: Opener = open_decoder,
    header: VideoHeader | None = None,
) -> PassResult:
    """Decode a local file once and feed every consumer. ``header``: what an earlier pass learned; given, no picture is
    decoded, and consumers only hear.

    Raises:
        MediaError: the file cannot be used at all. A consumer that fails alone is in ``failures``.
    """
    facts = PassFacts()
    failures: dict[str, MediaError] = {}
    if header is not None:
        facts.stream = header.stream
        summary = hear_alone(path, header, consumers, sink, failures)
        return PassResult(summary, facts, finish(summary, consumers, sink, failures), failures)
    with opener(path, stream) as decoder:
        live = list(consumers)
        ear = PassEar.of(decoder.container, live, sink, failures)
        decoder.ear = ear
        for shown in shown_frames(decoder, facts, video_key, live):
            if ear is not None:
                ear.begin()
            show(shown, live, sink, failures)
        tally = decoder.tally
        failed = ear.finish(path) if ear is not None else 0
        summary = VideoSummary(len(tally.pts), tally.end_pts, tally.damage, failed)
        products = finish(summary, live, sink, failures)
    return PassResult(summary, facts, products, failures)


def show(shown: ShownFrame, consumers: Sequence[PassConsumer], sink: Sink, failures: dict[str, MediaError]) -> None:
    """One frame to all consumers that have not failed."""
    for consumer in consumers:
        if consumer.name not in failures:
            _feed(consumer, shown, sink, failures)


def finish(
    summary: VideoSummary, consumers: Sequence[PassConsumer], sink: Sink, failures: dict[str, MediaError]
) -> dict[str, Product]:
    """Products by stage name, of the consumers that did not fail; their last rows go to the sink."""
    products = {}
    for consumer in consumers:
        if consumer.name in failures:
            continue
        try:
            product = consumer.finish(summary)
        except MediaError as e:
            failures[consumer.name] = e
            continue
        for row in product.rows:
            sink(consumer.name, dict(row))
        products[consumer.name] = product
    return products


def _feed(consumer: PassConsumer, shown: ShownFrame, sink: Sink, failures: dict[str, MediaError]) -> None:
    try:
        for row in consumer.see(shown) or ():
            sink(consumer.name, row)
    except MediaError as e:
        failures[consumer.name] = e


def shown_frames(
    decoder: Decoder,
    facts: PassFacts,
    video_key: str,
    consumers: Iterable[PassConsumer],
    *,
    start_pts: int | None = None,
    window: tuple[int, int | None] | None = None,
) -> Iterator[ShownFrame]:
    """Frames one behind the decoder, each with the pts of the next one. Consumers are begun at the first one; a pass
    over a window of a longer video is told where that starts.
    """
    held: Any = None
    index, size = 0, None
    frames: Iterator[Any] = decoder.frames()
    for frame in frames:
        if held is None:
            _first_frame(decoder, frame, facts)
            start = frame.pts if start_pts is None else start_pts
            header = VideoHeader(video_key, facts.stream, decoder.time_base, start, window)
            for consumer in consumers:
                consumer.begin(header)
        else:
            assert facts.geometry is not None
            yield ShownFrame(index, held.pts, frame.pts, Picture(held, facts.geometry))
            index += 1
        if size is not None and size != (frame.width, frame.height):
            facts.size_changes += 1
        size = (frame.width, frame.height)
        held = frame
    if held is not None:
        assert facts.geometry is not None
        yield ShownFrame(index, held.pts, decoder.tally.end_pts, Picture(held, facts.geometry))


def _first_frame(decoder: Decoder, frame: av.VideoFrame, facts: PassFacts) -> None:
    stream, context = decoder.stream, decoder.stream.codec_context
    facts.decoder = decoder
    facts.stream = stream.index
    facts.geometry = geometry_of(frame, stream)
    facts.container = decoder.container.format.name
    facts.codec = {"codec": context.codec.canonical_name, "profile": context.profile, "pix_fmt": frame.format.name}
    facts.first = {
        "range": int(frame.color_range),
        "space": int(frame.colorspace),
        "transfer": int(frame.color_trc),
        "primaries": int(frame.color_primaries),
        "interlaced": bool(frame.interlaced_frame),
    }
    facts.audio = [
        {
            "stream": s.index,
            "codec": getattr(s.codec_context, "name", None),
            "channels": int(s.codec_context.channels or 0) if s.codec_context else 0,
            "sample_rate": int(s.codec_context.sample_rate or 0) if s.codec_context else 0,
        }
        for s in decoder.container.streams.audio
    ]


def cached_pictures(
    path: str | Path, *, fps: object = 8, short_side: int = 256, stream: int | None = None
) -> Iterator[tuple[int, Picture, tuple[int, int]]]:
    """(pts, picture, its (width, height) in the cache) of every frame the cache would keep, damaged ones included.

    A picture is only valid until the next one.
    """
    rate = parse_rate(fps)
    grid: Grid | None = None
    size: tuple[int, int] | None = None
    with open_decoder(path, stream) as decoder:
        for shown in shown_frames(decoder, PassFacts(), "", ()):
            if grid is None or size is None:
                grid = Grid(shown.pts, decoder.time_base, rate)
                size = shown.picture.geometry.fit_short_side(short_side)
            if grid.is_kept(shown.pts, shown.next_pts):
                yield shown.pts, shown.picture, size


def decode_pictures(
    path: str | Path, *, fps: object = 8, short_side: int = 256, stream: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """(pts, upright RGB uint8 (h, w, 3)) of every frame the cache would keep, before JPEG, damaged ones included."""
    for pts, picture, size in cached_pictures(path, fps=fps, short_side=short_side, stream=stream):
        yield pts, picture.rgb(*size)
