"""Where a job's figures go beside the job record: a Prometheus endpoint and a file of JSON lines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from videoflow.errors import InputError, MissingExtra
from videoflow.telemetry.metrics import METRICS, JobFigures, Metric
from videoflow.telemetry.watch import JobWatch

DEFAULT_HOST = "127.0.0.1"

#: One value of a metric: (metric, values of its labels, value).
Sample = tuple[str, tuple[str, ...], float]


def parse_address(text: str) -> tuple[str, int]:
    """``9400`` or ``0.0.0.0:9400``: (host, port).

    Raises:
        InputError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise InputError(f"--metrics-port {text!r} is not PORT or HOST:PORT, like 9400 or 0.0.0.0:9400")
    return host.strip("[]") or DEFAULT_HOST, int(port)


@contextlib.contextmanager
def serving(watch: JobWatch, address: str | None) -> Iterator[int | None]:
    """Serve the job's metrics at ``http://HOST:PORT/metrics`` while the block runs; the port (0 asks for a free one).

    Raises:
        MissingExtra: prometheus_client is not installed. InputError: the address cannot be had.
    """
    if address is None:
        yield None
        return
    host, port = parse_address(address)
    try:
        import prometheus_client as prometheus
    except ImportError as e:
        raise MissingExtra("prometheus_client", needed_for="--metrics-port", extra="metrics") from e
    registry = prometheus.CollectorRegistry()
    registry.register(_Collector(watch))
    try:
        server, thread = prometheus.start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as e:
        raise InputError(f"--metrics-port {address}: cannot listen there ({getattr(e, 'strerror', None) or e})") from e
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """Answers a scrape with what holds at that moment. A counter never falls, or it would be taken for a restart: what
    a decoder waited is told a little late, and then leaves one state for another.
    """

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def describe(self) -> list[Any]:
        """Asked at registration, instead of a scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values: dict[str, list[Sample]] = {}
        for sample in samples(self._watch.figures()):
            values.setdefault(sample[0], []).append(sample)
        for m in METRICS:
            kind = CounterMetricFamily if m.kind == "counter" else GaugeMetricFamily
            family = kind(m.name, m.help, labels=["job", *m.labels])
            for _, labels, value in values.get(m.name, []):
                family.add_metric([self._watch.job, *labels], self._kept(m, labels, value))
            yield family

    def _kept(self, metric: Metric, labels: tuple[str, ...], value: float) -> float:
        if metric.kind != "counter":
            return value
        key = (metric.name, labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def samples(figures: JobFigures) -> Iterator[Sample]:
    """Every value of every metric."""
    for s in figures.stages:
        yield "videoflow_items_total", (s.stage,), s.items
        yield "videoflow_frames_total", (s.stage,), s.frames
        yield "videoflow_read_bytes_total", (s.stage,), s.bytes_read
        yield "videoflow_written_bytes_total", (s.stage,), s.bytes_written
        yield "videoflow_stage_seconds_total", (s.stage,), s.seconds
        yield "videoflow_workers", (s.stage,), s.workers if s.running else 0
        for name, parts in (("worker", s.states), ("consumer", s.consumers), ("driver", s.driver)):
            for part, seconds in parts.items():
                yield f"videoflow_{name}_seconds_total", (s.stage, part), seconds
        for queue in ("queued", "running", "waiting", "committed"):
            yield "videoflow_units", (s.stage, queue), getattr(s.units, queue)
    for process in ("driver", "workers", "children"):
        yield "videoflow_rss_bytes", (process,), getattr(figures.memory, process)
    if figures.verdict.stage:
        yield "videoflow_bottleneck", (figures.verdict.stage, figures.verdict.bottleneck), 1


@contextlib.contextmanager
def appending(watch: JobWatch, path: str | None) -> Iterator[None]:
    """Append a line of JSON to a file at every sample while the block runs, and one at its end.

    Raises:
        InputError: the file cannot be opened.
    """
    if path is None:
        yield
        return
    try:
        file = Path(path).expanduser().open("a", encoding="utf-8")
    except OSError as e:
        raise InputError(f"--metrics-file {path}: cannot be written ({e.strerror})") from e
    with file:
        watch.listen(_line_writer(watch, file))
        yield


def _line_writer(watch: JobWatch, file: TextIO) -> Callable[[JobFigures], None]:
    def write(figures: JobFigures) -> None:
        file.write(json.dumps({"job": watch.job, **figures.to_dict()}) + "\n")
        file.flush()

    return write
