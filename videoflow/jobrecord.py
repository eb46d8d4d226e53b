"""Job records: what the catalog knows of every run, while it runs and afterwards.

``jobs/<job>.json`` holds what was asked (enough to run it again), the state (running | finished | stopped | cancelled),
a heartbeat, counts by stage and what the watch sees (docs/watching.md); ``.log`` what the job said; ``.cancel`` is put
by whoever wants it stopped. The job itself writes the first two, every few seconds, from a thread of its own, and looks
for the third in the same breath.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from videoflow.errors import DamagedCatalog, JobCancelled, QueryError, SystemFailure
from videoflow.execute import JobOptions, Progress
from videoflow.recipe import Recipe, parse
from videoflow.sources import printable
from videoflow.store.damage import check_record, parsed
from videoflow.store.layout import Root
from videoflow.telemetry.watch import JobWatch
from videoflow.unit import UnitReport

RUNNING, FINISHED, STOPPED, CANCELLED, LOST = "running", "finished", "stopped", "cancelled", "lost"
HEARTBEAT_SECONDS = 3.0
#: A running job that has not been heard of for this long, and whose process cannot be seen from here, counts as lost.
LOST_AFTER_SECONDS = 60.0
MAX_LOG_LINES = 10_000
#: What a record holds at least, and its summary and its counts by stage if there are any.
_SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("done", "filtered", "quarantined", "pending", "videos", "clips", "decoded_videos"), int),
    "seconds": (int, float),
}
_COUNTS: dict[str, Any] = {
    **dict.fromkeys(("done", "total", "quarantined", "frames_decoded"), int),
    "unit": str,
    "seconds": (int, float),
}
_LIFE = {"job": str, "state": str, "started": str}
_RECORD = {**_LIFE, "name": str, "recipe": dict, "sources": list, "options": dict}


def new_job_id() -> str:
    """An id that sorts by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def record_path(job: str, suffix: str = ".json") -> str:
    return f"jobs/{job}{suffix}"


def describe(recipe: Recipe, sources: Iterable[str], name: str, options: JobOptions) -> dict[str, Any]:
    """What was asked, fit to be stored: local sources absolute, URLs without credentials and query. Sources that are
    not whole any more are named under ``masked_sources``.
    """
    whole = [_absolute(s) for s in sources]
    shown = [printable(s) for s in whole]
    return {
        "name": name,
        "recipe": shown_recipe(recipe) | {"sources": []},
        "sources": shown,
        "masked_sources": [p for s, p in zip(whole, shown, strict=True) if s != p],
        "options": {f.name: getattr(options, f.name) for f in fields(options)},
    }


def shown_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as data that may be stored: no credentials in its sources."""
    return recipe.model_dump(mode="json") | {"sources": [printable(s) for s in recipe.sources]}


def _absolute(source: str) -> str:
    """So that another process, in another folder, means the same files."""
    return source if "://" in source else os.path.abspath(os.path.expanduser(source))


def asked(record: dict[str, Any]) -> tuple[Recipe, list[str], str, JobOptions]:
    """Recipe, sources, name and options of a recorded job, to run it again.

    Raises:
        QueryError: a source was given with credentials or a query, which are not stored.
    """
    masked = record.get("masked_sources", [])
    if masked:
        raise QueryError(
            f"job {record['job']} cannot be resumed from its record: the credentials or query of {', '.join(masked)} "
            "are not stored; start the same `videoflow run` again, which goes on where it stopped"
        )
    known = {f.name for f in fields(JobOptions)}
    options = JobOptions(**{k: v for k, v in record["options"].items() if k in known})
    return parse(record["recipe"], origin=f"job {record['job']}"), list(record["sources"]), record["name"], options


# -- reading ---------------------------------------------------------------------------------------------------------


def all_jobs(root: Root, *, bad: list[str] | None = None, needs: Mapping[str, Any] = _RECORD) -> list[dict[str, Any]]:
    """Records of all jobs, oldest first, with the state that holds now (`state_now`). With ``bad`` a damaged one is
    left out and a line about it put there.

    Raises:
        DamagedCatalog: a damaged record, without ``bad``.
    """
    found = []
    for path in root.paths("jobs"):
        try:
            record = _read(root, path, needs) if _is_record(path) else None
        except DamagedCatalog as e:
            if bad is None:
                raise
            bad.append(str(e))
            continue
        if record is not None:
            found.append(record | {"state": state_now(record)})
    return sorted(found, key=lambda r: (str(r["started"]), str(r["job"])))


def _is_record(path: str) -> bool:
    """False for logs, requests to stop, and what file managers leave behind."""
    name = path.removeprefix("jobs/")
    return name.endswith(".json") and "/" not in name and not name.startswith(".")


def _read(root: Root, path: str, needs: Mapping[str, Any] = _RECORD) -> dict[str, Any] | None:
    """A job's record, None if it is gone.

    Raises:
        DamagedCatalog: it is not what a job writes.
    """
    record = root.get_json(path)
    if record is not None:
        parsed(root.url, path, lambda: _check(root, path, record, needs))
    return record


def _check(root: Root, path: str, record: dict[str, Any], needs: Mapping[str, Any]) -> None:
    check_record(root.url, path, record, needs)
    for name, counts in (("summary", _SUMMARY), *((f"stages.{k}", _COUNTS) for k in record.get("stages") or {})):
        part = record["stages"][name.partition(".")[2]] if name != "summary" else record.get("summary")
        if part:
            check_record(root.url, path, part, counts)
    for name in ("started", "heartbeat", "ended"):
        if record.get(name) is not None and datetime.fromisoformat(record[name]).tzinfo is None:
            raise ValueError(f"{name} has no time zone")
    if not all(isinstance(s, str) for s in [*record.get("sources", []), *record.get("masked_sources", [])]):
        raise TypeError("a source is no text")
    if not 0 < record.get("pid", 1) < 1 << 31:
        raise ValueError("pid is out of range")


def find_job(root: Root, job: str) -> dict[str, Any]:
    """The record of a job by its id, or by the beginning of it if that is enough, with the state that holds now.

    Raises:
        QueryError: none, or several.
    """
    ids = [p.removeprefix("jobs/").removesuffix(".json") for p in root.paths("jobs") if _is_record(p)]
    matches = [job] if job in ids else [i for i in ids if job and i.startswith(job)]
    record = _read(root, record_path(matches[0])) if len(matches) == 1 else None
    if record is None:
        what = f"{len(matches)} jobs begin with {job!r}" if matches else f"no job {job!r} in {root.url}"
        raise QueryError(f"{what}; `videoflow jobs {root.url}` lists them")
    return record | {"state": state_now(record)}


def state_now(record: dict[str, Any], now: datetime | None = None) -> str:
    """The recorded state, or ``lost``: it says running, but its process is gone (seen on its own machine), or it has
    not been heard of for a minute (seen from elsewhere).
    """
    state = str(record["state"])
    if state != RUNNING:
        return state
    alive = _is_alive(record)
    if alive is None:
        alive = silence_seconds(record, now) <= LOST_AFTER_SECONDS
    return RUNNING if alive else LOST


def silence_seconds(record: dict[str, Any], now: datetime | None = None) -> float:
    """How long ago a job was last heard of."""
    heard = datetime.fromisoformat(record.get("heartbeat") or record["started"])
    return ((now or datetime.now(UTC)) - heard).total_seconds()


def oldest_running(root: Root) -> datetime | None:
    """When the oldest of the running jobs started."""
    started = [datetime.fromisoformat(r["started"]) for r in all_jobs(root, needs=_LIFE) if r["state"] == RUNNING]
    return min(started, default=None)


def _is_alive(record: dict[str, Any]) -> bool | None:
    """Whether the job's process lives; None where that cannot be seen from here."""
    here = _process()
    if "pid" not in record or any(record.get(k) != here[k] for k in ("host", "pid_namespace")):
        return None
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(record["pid"]) == record.get("process_started")


def _process(pid: int | None = None) -> dict[str, Any]:
    """Which process this is: a pid is only a name on one host, in one namespace, for as long as the process lives."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    pid = pid or os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "pid_namespace": namespace, "process_started": _started(pid)}


def _started(pid: int) -> str:
    """When a process started, in the kernel's own count; empty where /proc does not say (a zombie counts as gone)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "zombie" if state == "Z" else rest[18]


# -- writing ---------------------------------------------------------------------------------------------------------


class RecordedProgress:
    """Progress that is passed on, counted for the record and written to the log."""

    def __init__(self, inner: Progress, check: Callable[[], None]) -> None:
        self._inner = inner
        self._check = check
        self.stage = ""
        self.stages: dict[str, dict[str, Any]] = {}
        self.lines: list[str] = []
        self._began = time.monotonic()

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage begins; the one before it has ended."""
        self._check()
        self.end_stage()
        fresh = {"total": 0, "done": 0, "unit": unit, "quarantined": 0, "frames_decoded": 0, "seconds": 0.0}
        counts = self.stages.setdefault(stage, fresh)
        counts["total"] = counts["done"] + total  # a stage may begin again with what is still missing
        self.stage, self._began = stage, time.monotonic() - counts["seconds"]
        self.log(f"{stage}: begins, {total} {unit}")
        self._inner.begin(stage, total, unit)

    def advance(self, stage: str, report: UnitReport) -> None:
        """Counts of one report."""
        self._check()
        counts = self.stages[stage]
        counts["done"] += report.items
        counts["quarantined"] += report.quarantined
        counts["frames_decoded"] += report.frames_decoded
        counts["seconds"] = round(time.monotonic() - self._began, 3)
        self._inner.advance(stage, report)

    def note(self, message: str) -> None:
        """A line for people."""
        self.log(message)
        self._inner.note(message)

    def log(self, message: str) -> None:
        self.lines.append(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {message}")
        del self.lines[:-MAX_LOG_LINES]

    def end_stage(self) -> None:
        """The stage in hand has ended."""
        if self.stage:
            c = self.stages[self.stage]
            bad = f", {c['quarantined']} quarantined" if c["quarantined"] else ""
            frames = f", {c['frames_decoded']} frames decoded" if c["frames_decoded"] else ""
            self.log(f"{self.stage}: ends, {c['done']} of {c['total']} {c['unit']}{frames}{bad}, {c['seconds']:.1f} s")
        self.stage = ""


class JobRecord:
    """The record of the job that runs in this process. ``start`` … ``settle`` … ``end``."""

    def __init__(
        self, root: Root, job: str, description: dict[str, Any], inner: Progress, watch: JobWatch | None = None
    ) -> None:
        self._root = root
        self._job = job
        self._watch = watch
        self.progress = RecordedProgress(inner, self._stop_if_asked)
        self.cancelled = False
        self._data = {"job": job, **description, "started": _now(), "state": RUNNING, **_process()}
        self._lock = threading.Lock()
        self._settled = self._ended = False
        self._last_logged = ""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="job-record", daemon=True)
        in_main = threading.current_thread() is threading.main_thread()
        # Where a signal of Ctrl-C is listened to, cancelling is the same signal; elsewhere the next report raises.
        self._by_signal = in_main and callable(signal.getsignal(signal.SIGINT))

    def start(self) -> None:
        """Write the first record; from here on the job is heard of."""
        self._write()
        self._thread.start()

    def settle(self) -> None:
        """The work is done: who cancels now is too late."""
        with self._lock:
            self._settled = True
        time.sleep(0)  # a signal that was sent before is answered here

    def end(self, state: str, summary: dict[str, Any], error: str | None) -> None:
        """Write the last record."""
        with self._lock:
            self._settled = True
        self._wake.set()
        with contextlib.suppress(RuntimeError):  # it never began
            self._thread.join(timeout=HEARTBEAT_SECONDS)
        self.progress.end_stage()
        self.progress.log(state + (f": {error}" if error else ""))
        self._data.update(state=state, ended=_now(), summary=summary, error=error)
        self._write(last=True)
        self._root.delete(record_path(self._job, ".cancel"))

    def _beat(self) -> None:
        while not self._wake.wait(HEARTBEAT_SECONDS):
            try:
                self._write()
                if not self.cancelled and self._root.has(record_path(self._job, ".cancel")):
                    self._cancel()
            except SystemFailure as e:  # the work goes on; it meets the same storage and decides for itself
                self.progress.log(f"heartbeat failed: {e}")

    def _write(self, *, last: bool = False) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = last
            progress = self.progress
            counts = {k: dict(v) for k, v in list(progress.stages.items())}
            watch = self._watch.figures().to_dict() if self._watch else None
            self._data.update(heartbeat=_now(), stage=progress.stage, stages=counts, watch=watch)
            self._root.put(record_path(self._job), json.dumps(self._data, indent=1, default=str).encode())
            lines = list(progress.lines)
            if lines and lines[-1] != self._last_logged:
                self._root.put(record_path(self._job, ".log"), "".join(f"{line}\n" for line in lines).encode())
                self._last_logged = lines[-1]

    def _cancel(self) -> None:
        with self._lock:
            if self._settled:
                return
            self.cancelled = True
            main = threading.main_thread().ident
            if self._by_signal and main is not None:
                signal.pthread_kill(main, signal.SIGINT)

    def _stop_if_asked(self) -> None:
        if self.cancelled and not self._by_signal and not self._settled:
            raise self.failure()

    def failure(self) -> JobCancelled:
        """What a cancelled job raises."""
        return JobCancelled(
            f"job {self._job} was cancelled; `videoflow resume {self._root.url} {self._job}` goes on where it stopped"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat()
