"""The Ray engine: units flow through Ray Data on a pool of actors; only descriptors and reports travel, never pixels.

The only file that imports ray. Started in the job's own process (embedded Ray), or attached to a cluster that the
environment names (RAY_ADDRESS).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil

from videoflow.errors import EXIT_SYSTEM, InputError, MissingExtra, SystemFailure, VideoflowError, first_line
from videoflow.sources import printable
from videoflow.telemetry.meter import Meter, WorkerSnapshot
from videoflow.telemetry.watch import SAMPLE_SECONDS
from videoflow.unit import UnitReport, Units

try:
    import ray
    import ray.data
    import ray.exceptions
except ImportError as e:  # pragma: no cover - exercised by the wheel's smoke test
    raise MissingExtra("ray", needed_for="--engine ray", extra="ray") from e

#: Ray's object store holds descriptors and reports only.
OBJECT_STORE_BYTES = 256 << 20
#: The driver waits this long for what workers have written; a busy cluster may answer the next time.
BOARD_SECONDS = 2.0
#: How often the driver looks whether its Ray node lives.
LOOK_SECONDS = 0.25


class _Board:
    """An actor of its own on which workers write how they are, for the driver to read while units run."""

    def __init__(self) -> None:
        self._newest: dict[str, WorkerSnapshot] = {}

    def put(self, snapshot: WorkerSnapshot) -> None:
        self._newest[snapshot.key] = snapshot

    def of_run(self, run: str) -> list[WorkerSnapshot]:
        """The newest of each worker of a run; older runs are forgotten."""
        self._newest = {k: w for k, w in self._newest.items() if k.startswith(f"{run}/")}
        return list(self._newest.values())


class _Actor:
    """One worker process: units in, reports out, both pickled."""

    def __init__(self, memory_bytes: int | None, board: Any, run: str) -> None:
        import cv2

        from workers.run_unit import UnitRunner

        cv2.setNumThreads(1)
        self._runner = UnitRunner(memory_bytes=memory_bytes)
        here, pid = socket.gethostname(), os.getpid()
        self._meter = Meter(f"{run}/{here}:{pid}:{secrets.token_hex(2)}", f"{here}:{pid}", pid=pid)
        threading.Thread(target=self._tell, args=(board,), name="watch", daemon=True).start()

    def _tell(self, board: Any) -> None:
        while True:
            try:
                board.put.remote(self._meter.snapshot())
            except Exception:  # the driver is gone, and this process soon
                return
            time.sleep(SAMPLE_SECONDS)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        from workers.watched import run_watched

        answers = []
        for data in batch["unit"]:
            try:
                answers.append(pickle.dumps(run_watched(self._runner, pickle.loads(data), self._meter)))
            except VideoflowError as e:  # the system's failure: the driver raises it, the pool is not retried
                answers.append(pickle.dumps(e))
        return {"report": answers}


class RayEngine:
    """Runs units on ``workers`` actors, one a core of the cluster unless told. ``memory_bytes``: what one decoding
    child may take.
    """

    def __init__(self, *, workers: int | None, memory_bytes: int | None = None) -> None:
        self._asked = workers
        self._memory = memory_bytes
        self._owns = not ray.is_initialized()
        if self._owns:
            _refuse_dashboard(os.environ.get("RAY_ADDRESS", ""))
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ layer would write into our progress
            try:
                with warnings.catch_warnings(), _quiet_native_log():
                    warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray forks only to exec
                    ray.init(
                        address=os.environ.get("RAY_ADDRESS", "local"),
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        configure_logging=True,
                        **self._local_options(),
                    )
            except Exception as e:  # Ray raises bare Exceptions too, e.g. where the machine is too busy for its start
                raise SystemFailure(f"cannot start Ray: {first_line(e)}; run the same command again to resume") from e
        #: Nodes that an autoscaler has yet to start are not counted: there the number has to be told.
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._board: Any = ray.remote(num_cpus=0)(_Board).remote()
        self._run, self._asking = "", threading.Lock()
        self._raylet, self._is_lost, self._last_words = _own_raylet(), False, _LastWords()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it has to say of errors, it also raises

    def _local_options(self) -> dict[str, Any]:
        if "RAY_ADDRESS" in os.environ:
            return {}
        return {
            "num_cpus": self._asked or os.cpu_count() or 1,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }

    def run(self, units: Units) -> Iterator[UnitReport]:
        """Reports as units end.

        Raises:
            SystemFailure: a worker's, or Ray's own.
        """
        workers = min(self.workers, len(units))
        self._run = secrets.token_hex(4)
        rows = [{"unit": pickle.dumps(u)} for u in units]
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(self._memory, self._board, self._run),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=1,
        )
        try:
            for report in self._reports(data):
                answer = pickle.loads(report)
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        except (ray.exceptions.RayError, RuntimeError) as e:
            raise SystemFailure(f"Ray stopped the job: {_last_line(e)}; run the same command again to resume") from e

    def _reports(self, data: Any) -> Iterator[bytes]:
        """Rows as they come, taken in a thread of its own: when the raylet of this node dies, Ray ends the process some
        seconds later, without a word, and those are for telling why.

        Raises:
            SystemFailure: the raylet is gone. What Ray raises.
        """
        found: queue.Queue[tuple[bytes | None, BaseException | None]] = queue.Queue(maxsize=self.workers)
        stop = threading.Event()

        def put(report: bytes | None, error: BaseException | None = None) -> bool:
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    found.put((report, error), timeout=LOOK_SECONDS)
                    return True
            return False

        def take() -> None:
            try:
                for row in data.iter_rows():
                    if not put(row["report"]):
                        return
                put(None)
            except BaseException as e:
                put(None, e)

        threading.Thread(target=take, name="ray-rows", daemon=True).start()
        try:
            while True:
                self._check_node()
                with contextlib.suppress(queue.Empty):
                    report, error = found.get(timeout=LOOK_SECONDS)
                    if error is not None:
                        self._check_node()  # the deeper reason
                        raise error
                    if report is None:
                        return
                    yield report
        finally:
            stop.set()

    def _check_node(self) -> None:
        if self._raylet is not None and not _lives(self._raylet):
            self._is_lost = True
            raise SystemFailure("the Ray node that this job runs on has died; run the same command again to resume")

    def watch(self) -> list[WorkerSnapshot]:
        """How the workers are now, or were a moment ago."""
        with self._asking:
            if self._board is None:
                return []
            found: list[WorkerSnapshot] = ray.get(self._board.of_run.remote(self._run), timeout=BOARD_SECONDS)
            return found

    def close(self) -> None:
        """Ends the embedded cluster and its processes; one that was there before is left alone."""
        if self._is_lost:
            self._last_words.withdraw()
            _forget_ray()
            return
        with self._asking, contextlib.suppress(Exception):  # a question after the end would start Ray anew
            board, self._board = self._board, None
            ray.kill(board)
        if self._owns:
            ray.shutdown()
        self._last_words.withdraw()


class _LastWords:
    """What is printed if this process ends without another word: Ray ends it at once, with code 1, when it finds its
    node gone in the middle of a call; a kernel that is out of memory does so too. A shell waits for the end of a pipe.
    """

    TEXT = (
        "videoflow: the job's process was ended from outside: it was killed, or its Ray node died; "
        "run the same command again to resume"
    )

    def __init__(self) -> None:
        script = 'read -r word || printf "%s\\n" "$0" >&2'
        try:
            self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
                ["sh", "-c", script, self.TEXT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        except OSError:  # no shell, no words
            self._shell = None

    def withdraw(self) -> None:
        if self._shell is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._shell.communicate(b"ended\n", timeout=5)


def _own_raylet() -> psutil.Process | None:
    """The process of the Ray node that this one has joined; None where it cannot be told."""
    socket_name = str(getattr(getattr(ray._private.worker, "_global_node", None), "raylet_socket_name", ""))
    for process in psutil.process_iter() if socket_name else ():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and socket_name in " ".join(process.cmdline()):
                return process
    return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _forget_ray() -> None:
    """Without a raylet every further word to Ray ends this process at once, with code 1 and no message, and Ray has
    something to say when the interpreter ends: end what is left of it, and leave before that.
    """
    atexit.register(_leave)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "ray::" in command or f"{os.sep}ray{os.sep}" in command:
                process.kill()


def _leave() -> None:
    """The end of a process that has lost Ray: its error was shown or handled before."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(EXIT_SYSTEM)


def _refuse_dashboard(address: str) -> None:
    if address.startswith(("http://", "https://")):
        raise InputError(
            f"RAY_ADDRESS is {printable(address)}, a dashboard, to which jobs are sent: give it to "
            "`videoflow submit --address`, or unset RAY_ADDRESS to run on this machine"
        )


@contextlib.contextmanager
def _quiet_native_log() -> Iterator[None]:
    """Ray's C++ layer announces its own log level on stderr while it starts; nothing of ours is written meanwhile."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _last_line(e: BaseException) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return (lines[-1] if lines else type(e).__name__)[:300]
