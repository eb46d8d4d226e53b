"""The Ray engine: units flow through Ray Data on a pool of actors; only descriptors and reports travel, never pixels.

The only file that imports ray. Started in the job's own process (embedded Ray), or attached to a cluster that the
environment names (RAY_ADDRESS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from videoflow.errors import InputError, MissingExtra, SystemFailure, VideoflowError, first_line
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
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

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
            for row in data.iter_rows():
                answer = pickle.loads(row["report"])
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        except (ray.exceptions.RayError, RuntimeError) as e:
            raise SystemFailure(f"Ray stopped the job: {_last_line(e)}; run the same command again to resume") from e

    def watch(self) -> list[WorkerSnapshot]:
        """How the workers are now, or were a moment ago."""
        with self._asking:
            if self._board is None:
                return []
            found: list[WorkerSnapshot] = ray.get(self._board.of_run.remote(self._run), timeout=BOARD_SECONDS)
            return found

    def close(self) -> None:
        """Ends the embedded cluster and its processes; one that was there before is left alone."""
        with self._asking, contextlib.suppress(Exception):  # a question after the end would start Ray anew
            board, self._board = self._board, None
            ray.kill(board)
        if self._owns:
            ray.shutdown()


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
