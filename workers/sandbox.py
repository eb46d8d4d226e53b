"""Decoding in a child process: a hang, a crash or an error of the decoder costs one video, never the worker.

One pooled child per worker (spawned, never forked); a deadline on progress; a limit on its resident memory (a
limit on address space breaks libraries that map much); the child is replaced when it dies.
Rows leave the child through Arrow files in a spool folder, so pixels cross no process boundary except as encoded
chunks, and neither side ever holds a whole video.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
from pebble import ProcessExpired, ProcessPool

from videoflow.errors import MediaError, SystemFailure, VideoflowError, first_line
from videoflow.persist import storage_failure
from videoflow.stage import HeardSound, PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary
from workers.child_meter import ChildMeter, PassClock

if TYPE_CHECKING:
    from workers.decode import Opener

#: A decode that shows no new frame for this long has hung. Sizes and headers say too little: an hour of black is 6 MB.
DEADLINE_SECONDS = 120.0
#: Resident memory a decoding child may take; a 1-hour 4K video needs about 1 GB.
MEMORY_BYTES = 4 << 30
ATTEMPTS = 3
POLL_SECONDS, JOIN_SECONDS = 0.1, 20.0
SPOOL_PREFIX = "videoflow-spool-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class DecodedVideo:
    """What came of one video: facts and digests here, rows in the spool files (by stage name). ``left_to_cpu``: why a
    GPU was asked for and did not decode it.
    """

    stream: int
    num_frames: int
    damage: tuple[tuple[int, int], ...]
    digests: dict[str, str]
    failures: dict[str, MediaError]
    files: dict[str, str]
    rows: dict[str, int] = field(default_factory=dict)
    left_to_cpu: str | None = None


def spool_schema(stage: PassConsumer) -> pa.Schema:
    """The stage's columns as its consumer yields them: no head columns, blobs as plain bytes."""
    head = {"item_key", "input_digest", "video_key", "stream"}
    fields = []
    for f in stage.schema():
        if f.name not in head:
            fields.append(pa.field(f.name, pa.large_binary() if isinstance(f.type, pa.ExtensionType) else f.type))
    return pa.schema(fields)


class Spool:
    """Row files of one video, one per stage that yields rows."""

    def __init__(self, folder: str, name: str, consumers: list[PassConsumer]) -> None:
        self.paths = {c.name: str(Path(folder, f"{name}-{c.name}.arrow")) for c in consumers}
        self.schemas = {c.name: spool_schema(c) for c in consumers}
        self.rows = {c.name: 0 for c in consumers}
        self._writers: dict[str, Any] = {}

    def add(self, stage: str, row: dict[str, Any]) -> None:
        if stage not in self._writers:
            self._writers[stage] = pa.ipc.new_file(self.paths[stage], self.schemas[stage])
        self._writers[stage].write_batch(pa.RecordBatch.from_pylist([row], schema=self.schemas[stage]))
        self.rows[stage] += 1

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


_SET_UP: dict[str, PassConsumer] = {}
_HEARTBEAT: Any = None  # in the child: counts frames, where the parent sees it
_CLOCK: PassClock  # in the child: what its time goes to


def clock() -> PassClock:
    """In the child: what its time goes to."""
    return _CLOCK


class Heartbeat(PassConsumer):
    """Rides along and tells the parent that there is progress."""

    name, version, table = "heartbeat", 1, ""

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def begin(self, video: VideoHeader) -> None:
        _HEARTBEAT.value += 1

    def see(self, frame: ShownFrame) -> None:
        _HEARTBEAT.value += 1

    def hear(self, sound: HeardSound) -> None:
        _HEARTBEAT.value += 1

    def finish(self, summary: VideoSummary) -> Product:
        return Product()


def set_up(works: list[tuple[str, PassConsumer]]) -> list[PassConsumer]:
    """Runs in the child. Consumers of (fingerprint, consumer), each set up once a child and kept."""
    _HEARTBEAT.value += 1
    consumers = []
    for fp, stage in works:
        if fp not in _SET_UP:
            stage.setup()
            _SET_UP[fp] = stage
        consumers.append(_SET_UP[fp])
    return consumers


@dataclass(frozen=True)
class PassTask:
    """A pass over one file; ``header``: what an earlier pass learned, where no picture is to be decoded."""

    path: str
    video_key: str
    stream: int | None
    works: list[tuple[str, PassConsumer]]
    header: VideoHeader | None


def _decode(task: PassTask, folder: str) -> DecodedVideo:
    """Runs in the child."""
    from videoflow.media.decoder import open_decoder
    from workers.nvdec import by_decoder, decoder_of

    consumers = set_up(task.works)
    work = partial(_pass, task=task, consumers=consumers, folder=folder)
    if task.header is not None:  # no picture is decoded
        return work(open_decoder)
    decoded, why = by_decoder(decoder_of(consumers), task.path, task.stream, work)
    return replace(decoded, left_to_cpu=why)


def _pass(opener: Opener, *, task: PassTask, consumers: list[PassConsumer], folder: str) -> DecodedVideo:
    from workers.decode import run_pass
    from workers.probe import videos_row

    spool = Spool(folder, task.video_key, consumers)
    try:
        with _CLOCK.passing():
            result = run_pass(
                task.path,
                video_key=task.video_key,
                consumers=_CLOCK.ride([*consumers, Heartbeat()]),
                sink=_CLOCK.sink(spool.add),
                stream=task.stream,
                opener=opener,
                header=task.header,
            )
        digests = {name: product.digest for name, product in result.products.items()}
        if any(c.name == "probe" for c in consumers):
            row, digests["probe"] = videos_row(result.facts, result.summary)
            spool.add("probe", row)
    finally:
        spool.close()
    return DecodedVideo(
        result.facts.stream,
        result.summary.num_frames,
        result.summary.damage,
        digests,
        result.failures,
        spool.paths,
        spool.rows,
    )


def _begin_child(parent: int, pid: Any, heartbeat: Any, meter: Any) -> None:
    """The child dies with its parent (kill -9 included), leaves Ctrl-C to it, and tells its pid."""
    global _HEARTBEAT, _CLOCK
    _HEARTBEAT, _CLOCK = heartbeat, PassClock(meter)
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the closed pipe ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        os._exit(1)
    import av
    import cv2

    cv2.setNumThreads(1)
    av.logging.set_level(av.logging.FATAL)
    pid.value = os.getpid()  # from here on it is watched: what it took to start is nobody's fault


class _ChildDied(Exception):
    """The child's exit code."""


class _NeverBegan(Exception):
    """The child died while it started."""


class Sandbox:
    """One child process that decodes; it may hold ``memory_bytes``. Use as a context manager."""

    def __init__(self, *, memory_bytes: int | None = None) -> None:
        self._memory = memory_bytes or MEMORY_BYTES
        self._context = multiprocessing.get_context("spawn")
        self._child = self._context.Value("i", 0)
        self._frames = self._context.Value("q", 0)
        self._meter = ChildMeter(self._context)
        self._pool: ProcessPool | None = None
        self._killed = False

    def decode(
        self,
        path: str,
        *,
        video_key: str,
        stream: int | None,
        works: list[tuple[str, PassConsumer]],
        folder: str,
        header: VideoHeader | None = None,
    ) -> DecodedVideo:
        """Decode one file in the child; see `run`. ``header``: what an earlier pass learned, to hear the file only."""
        task = PassTask(path, video_key, stream, works, header)
        decoded: DecodedVideo = self.run(_decode, task, folder, riders=[stage.name for _, stage in works])
        return decoded

    def run(self, function: Callable[..., Any], *task: Any, riders: Sequence[str] = ()) -> Any:
        """Call a function in the child; the last argument is the spool folder, ``riders``: the stages that ride the
        pass. A child that dies is not held against the video the first time: it may have been killed from outside.

        Raises:
            MediaError: the file cannot be used, ``timeout`` or ``crash`` included.
            SystemFailure: what is wrong is not the file.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._meter.decoding(riders):
                    return self._run_once(function, task)
            except _ChildDied as e:
                if attempt == ATTEMPTS or self._killed:
                    raise MediaError("crash", f"the decoder ended its process {attempt} times (exit code {e})") from e
            except _NeverBegan as e:
                if attempt == ATTEMPTS:
                    raise SystemFailure(
                        "decoding processes cannot be started: out of memory or processes, or the job was started "
                        "from a script without if __name__ == '__main__':"
                    ) from e
        raise AssertionError("unreachable")

    def _run_once(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=1,
                context=self._context,
                initializer=_begin_child,
                initargs=[os.getpid(), self._child, self._frames, self._meter.shared],
            )
        future = self._pool.schedule(function, args=task)
        killed_for = None
        try:
            killed_for = self._watch(future)
            answer = future.result()
        except ProcessExpired as e:
            if killed_for == "timeout":
                raise MediaError("timeout", f"decoding gave no new frame for {DEADLINE_SECONDS:.0f} s") from e
            if killed_for == "out_of_memory":
                raise MediaError("out_of_memory", f"decoding took more than {self._memory >> 20} MiB of memory") from e
            raise _ChildDied(e.exitcode) from e
        except BrokenExecutor as e:  # the child died before it had begun: no video's fault
            self._pool = None
            if self._killed:
                raise MediaError("crash", "decoding was stopped") from e
            if killed_for == "out_of_memory":
                took = f"a decoding process takes more than its {self._memory >> 20} MiB before it opens a video"
                raise SystemFailure(f"{took}; raise --memory") from e
            raise _NeverBegan from e
        except VideoflowError:
            raise
        except CancelledError as e:
            raise MediaError("crash", "decoding was stopped") from e
        except MemoryError as e:
            raise MediaError("out_of_memory", "decoding ran out of memory") from e
        except OSError as e:
            raise storage_failure(f"cannot write to the spool folder {task[-1]}", e) from e
        except Exception as e:
            raise MediaError("crash", f"decoding failed: {type(e).__name__}: {first_line(e)}") from e
        return answer

    def _watch(self, future: Future[Any]) -> str | None:
        """Wait for a decode; why its child was killed, if it was."""
        frames, since = self._frames.value, time.monotonic()
        while not wait([future], timeout=POLL_SECONDS).done:
            if self._killed:  # a pool that is stopped may leave its futures unanswered
                raise MediaError("crash", "decoding was stopped")
            if self._frames.value != frames:
                frames, since = self._frames.value, time.monotonic()
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(self._child.value) if self._child.value else None
                is_large = child is not None and child.memory_info().rss > self._memory
                if child is not None and (is_large or time.monotonic() - since > DEADLINE_SECONDS):
                    child.kill()
                    wait([future])
                    return "out_of_memory" if is_large else "timeout"
        return None

    def kill(self) -> None:
        """End the child now, from any thread; a decode in progress fails, a later one is refused."""
        self._killed = True
        pool = self._pool
        if pool is not None:
            pool.stop()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            with contextlib.suppress(TimeoutError):  # the child dies with this process at the latest
                self._pool.join(JOIN_SECONDS)
            self._pool = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def spool_folder() -> Iterator[str]:
    """A folder for row files, removed afterwards; those of processes that were killed are removed too."""
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{SPOOL_PREFIX}*"):
        pid = old.name.removeprefix(SPOOL_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    try:
        folder = tempfile.mkdtemp(prefix=f"{SPOOL_PREFIX}{os.getpid()}-")
    except OSError as e:
        raise SystemFailure(f"cannot make a spool folder in {base}: {e.strerror}") from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
