"""The Ray engine: units flow through Ray Data on a pool of actors; only descriptors and reports travel, never pixels.

The only file that imports ray. Started in the job's own process (embedded Ray), or attached to a cluster that the
environment names (RAY_ADDRESS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from videoflow.errors import MissingExtra, SystemFailure, VideoflowError
from videoflow.unit import Unit, UnitReport

try:
    import ray
    import ray.data
    import ray.exceptions
except ImportError as e:  # pragma: no cover - exercised by the wheel's smoke test
    raise MissingExtra("ray", needed_for="--engine ray", extra="ray") from e

#: Ray's object store holds descriptors and reports only.
OBJECT_STORE_BYTES = 256 << 20


class _Actor:
    """One worker process: units in, reports out, both pickled."""

    def __init__(self, memory_bytes: int | None) -> None:
        import cv2

        from workers.run_unit import UnitRunner

        cv2.setNumThreads(1)
        self._runner = UnitRunner(memory_bytes=memory_bytes)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers = []
        for data in batch["unit"]:
            try:
                answers.append(pickle.dumps(self._runner.run(pickle.loads(data))))
            except VideoflowError as e:  # the system's failure: the driver raises it, the pool is not retried
                answers.append(pickle.dumps(e))
        return {"report": answers}


class RayEngine:
    """Runs units on ``workers`` actors. ``memory_bytes``: what one decoding child may take."""

    def __init__(self, *, workers: int, memory_bytes: int | None = None) -> None:
        self._workers = max(1, workers)
        self._memory = memory_bytes
        self._owns = not ray.is_initialized()
        if self._owns:
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
                why = (str(e).splitlines() or [type(e).__name__])[0][:200]
                raise SystemFailure(f"cannot start Ray: {why}; run the same command again to resume") from e
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def _local_options(self) -> dict[str, Any]:
        if "RAY_ADDRESS" in os.environ:
            return {}
        return {
            "num_cpus": self._workers,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }

    def run(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        """Reports as units end.

        Raises:
            SystemFailure: a worker's, or Ray's own.
        """
        workers = min(self._workers, len(units))
        rows = [{"unit": pickle.dumps(u)} for u in units]
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(self._memory,),
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

    def close(self) -> None:
        """Ends the embedded cluster and its processes; one that was there before is left alone."""
        if self._owns:
            ray.shutdown()


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
