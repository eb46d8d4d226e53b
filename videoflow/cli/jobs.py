"""Commands about jobs: ``jobs``, ``status``, ``logs``, ``cancel``, ``resume``."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any

import typer

from videoflow.cli.data import RootArg
from videoflow.cli.output import json_line, print_json, tell_damage
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt, run_job
from videoflow.dataset.catalog import Catalog
from videoflow.errors import QueryError
from videoflow.jobrecord import RUNNING, all_jobs, asked, find_job, record_path, silence_seconds

JobArg = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or the beginning of it.")]
FollowOpt = Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")]
FOLLOW_SECONDS = 1.0


def register(app: typer.Typer) -> None:
    app.command("jobs")(jobs)
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("cancel")(cancel)
    app.command("resume")(resume)


def jobs(root: RootArg, as_json: JsonOpt = False) -> None:
    """List the jobs of a catalog, oldest first."""
    bad: list[str] = []
    records = all_jobs(Catalog.open(root).root, bad=bad)
    for r in records:
        if as_json:
            print_json(_short(r))
        else:
            say(f"{r['job']}  {r['state']:<9} {r['name']:<16} {_did(r)}")
    if not records and not bad and not as_json:
        say("no jobs yet; `videoflow run` starts one")
    tell_damage(bad)


def status(root: RootArg, job: JobArg, follow: FollowOpt = False, as_json: JsonOpt = False) -> None:
    """Say how a job is doing. States: running, finished, stopped, cancelled, lost (its process is gone)."""
    where = Catalog.open(root).root
    said = None
    while True:
        record = find_job(where, job)
        text = json_line(record) if as_json else _told(record)
        if text != said:
            say(text)
            said = text
        if not follow or record["state"] != RUNNING:
            return
        time.sleep(FOLLOW_SECONDS)


def logs(root: RootArg, job: JobArg) -> None:
    """Print what a job said: its notes, and when its stages began and ended."""
    where = Catalog.open(root).root
    log = where.get(record_path(find_job(where, job)["job"], ".log"))
    say(log.decode("utf-8", "replace").rstrip("\n") if log else "nothing yet")


def cancel(root: RootArg, job: JobArg) -> None:
    """Ask a running job to stop, as Ctrl-C does; it does so within seconds and can be resumed."""
    where = Catalog.open(root).root
    record = find_job(where, job)
    if record["state"] != RUNNING:
        raise QueryError(f"job {record['job']} is {record['state']}, not running: nothing to cancel")
    where.put(record_path(record["job"], ".cancel"), b"")
    say(f"asked job {record['job']} to stop; `videoflow status {root} {record['job']} -f` waits for it")


def resume(root: RootArg, job: JobArg, as_json: JsonOpt = False) -> None:
    """Run what a job was asked to do again: only what is missing is computed. Exit codes as those of run."""
    record = find_job(Catalog.open(root).root, job)
    if record["state"] == RUNNING:
        raise QueryError(f"job {record['job']} is running; `videoflow cancel {root} {record['job']}` stops it")
    recipe, sources, name, options = asked(record)
    run_job(recipe, sources, root=root, name=name, options=options, as_json=as_json, resumes=record["job"])


def _short(r: dict[str, Any]) -> dict[str, Any]:
    summary = r.get("summary") or {}
    keys = ("job", "state", "name", "resumes", "started", "ended", "heartbeat", "stage", "host", "pid", "error")
    return {**{k: r.get(k) for k in keys}, "recipe": r["recipe"].get("name"), "version": summary.get("version")}


def _did(r: dict[str, Any]) -> str:
    """One line: where a running job is, or what an ended one did."""
    if r["state"] == RUNNING or not r.get("summary"):
        stage = r.get("stage") or next(reversed(r.get("stages") or {"": {}}))
        counts = (r.get("stages") or {}).get(stage)
        at = f"{stage} {counts['done']} of {counts['total']} {counts['unit']}" if counts else "has not begun a stage"
        return f"{at}, heard of {max(silence_seconds(r), 0):.0f} s ago"
    s = r["summary"]
    videos = f"{s['done']} done, {s['filtered']} filtered, {s['quarantined']} quarantined, {s['pending']} pending"
    made = f"{s['version']}, {s['clips']} clips; " if s["version"] else ""
    counted = f"{made}videos: {videos}" if s["videos"] else f"{s['decoded_videos']} videos decoded"
    return f"{counted}; {s['seconds']:.1f} s"


def _told(r: dict[str, Any]) -> str:
    lines = [
        f"job {r['job']} · {r['state']} · {_did(r)}",
        f"  recipe {r['recipe'].get('name')} over {', '.join(r['sources'])} as {r['name']}",
        f"  started {_clock(r['started'])}"
        + (f", ended {_clock(r['ended'])}" if r.get("ended") else "")
        + f" · process {r.get('pid', '?')} on {r.get('host', '?')}",
    ]
    if r.get("resumes"):
        lines.append(f"  resumes {r['resumes']}")
    for stage, c in (r.get("stages") or {}).items():
        frames = f", {c['frames_decoded']} frames" if c["frames_decoded"] else ""
        bad = f", {c['quarantined']} quarantined" if c["quarantined"] else ""
        lines.append(f"  {stage:<12} {c['done']:>8} of {c['total']} {c['unit']}{frames}{bad}, {c['seconds']:.1f} s")
    if r.get("error"):
        lines.append(f"  {r['error']}")
    return "\n".join(lines)


def _clock(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
