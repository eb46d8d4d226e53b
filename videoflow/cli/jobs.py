"""Commands about jobs: ``jobs``, ``status``, ``logs``, ``cancel``, ``resume``."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any

import typer

from videoflow.cli.data import RootArg
from videoflow.cli.output import json_line, print_json, tell_damage
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt, MetricsFileOpt, MetricsPortOpt, run_job
from videoflow.cli.submit import AddressOpt, PythonOpt, WithOpt, hand_over
from videoflow.cli.watching import job_lines, stage_lines
from videoflow.dataset.catalog import Catalog
from videoflow.errors import QueryError, VideoflowError
from videoflow.jobrecord import RUNNING, all_jobs, asked, find_job, record_path, silence_seconds
from videoflow.jobs import FAILED, RayJobs, why_failed
from videoflow.submission import submission_of_resume
from videoflow.telemetry.verdict import NONE, TOO_SHORT

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


def logs(root: RootArg, job: JobArg, address: AddressOpt = None) -> None:
    """Print what a job said: its notes, and when its stages began and ended. With --address: all that a submitted job
    printed, also where it never began.
    """
    if address:
        _print_output(RayJobs(address), _submission(root, job))
        return
    where = Catalog.open(root).root
    log = where.get(record_path(find_job(where, job)["job"], ".log"))
    say(log.decode("utf-8", "replace").rstrip("\n") if log else "nothing yet")


def cancel(root: RootArg, job: JobArg, address: AddressOpt = None) -> None:
    """Ask a running job to stop, as Ctrl-C does; it does so within seconds and can be resumed. With --address: through
    the cluster it was submitted to, also before it has begun.
    """
    if address:
        if not RayJobs(address).stop(submission := _submission(root, job)):
            raise _unknown(submission, address)
        say(f"asked the cluster to stop job {job}")
        return
    where = Catalog.open(root).root
    record = find_job(where, job)
    if record["state"] != RUNNING:
        raise QueryError(f"job {record['job']} is {record['state']}, not running: nothing to cancel")
    where.put(record_path(record["job"], ".cancel"), b"")
    say(f"asked job {record['job']} to stop; `videoflow status {root} {record['job']} -f` waits for it")


def resume(
    root: RootArg,
    job: JobArg,
    address: AddressOpt = None,
    python: PythonOpt = None,
    take: WithOpt = None,
    metrics_port: MetricsPortOpt = None,
    metrics_file: MetricsFileOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Run what a job was asked to do again: only what is missing is computed. Exit codes as those of run. With
    --address a cluster does it, as after submit.
    """
    record = find_job(Catalog.open(root).root, job)
    if record["state"] == RUNNING:
        raise QueryError(f"job {record['job']} is running; `videoflow cancel {root} {record['job']}` stops it")
    recipe, sources, name, options = asked(record)
    if address:
        submission = submission_of_resume(recipe, record["job"], root=root, take=take or [], python=python)
        hand_over(RayJobs(address), submission, root=root, as_json=as_json)
        return
    outlets = (metrics_port, metrics_file)
    run_job(
        recipe, sources, root=root, name=name, options=options, as_json=as_json, resumes=record["job"], outlets=outlets
    )


def _submission(root: str, job: str) -> str:
    """What the cluster knows a job by: its submission's id, or what was given if the job has not begun yet."""
    try:
        record = find_job(Catalog.open(root).root, job)
    except VideoflowError:
        return job
    return str(record.get("submission") or record["job"])


def _print_output(client: RayJobs, submission: str) -> None:
    info = client.info(submission)
    if info is None:
        raise _unknown(submission, client.address)
    say(client.logs(submission).rstrip("\n"))
    say(why_failed(info) if info["status"] == FAILED else f"to the cluster it is {info['status'].lower()}")


def _unknown(submission: str, address: str) -> QueryError:
    return QueryError(f"the cluster at {address} knows no job {submission!r}")


def _short(r: dict[str, Any]) -> dict[str, Any]:
    summary = r.get("summary") or {}
    keys = "job state name resumes submission started ended heartbeat stage host pid error"
    verdict = (r.get("watch") or {}).get("verdict") or {}
    more = {"recipe": r["recipe"].get("name"), "version": summary.get("version")}
    return {**{k: r.get(k) for k in keys.split()}, **more, "bottleneck": verdict.get("bottleneck")}


def _did(r: dict[str, Any]) -> str:
    """One line: where a running job is, or what an ended one did."""
    if r["state"] == RUNNING or not r.get("summary"):
        stage = r.get("stage") or next(reversed(r.get("stages") or {"": {}}))
        counts = (r.get("stages") or {}).get(stage)
        at = f"{stage} {counts['done']} of {counts['total']} {counts['unit']}" if counts else "has not begun a stage"
        verdict = (r.get("watch") or {}).get("verdict") or {}
        if verdict.get("bottleneck", TOO_SHORT) not in (TOO_SHORT, NONE):
            at += f", held up by {verdict['bottleneck']}"
        return f"{at}, heard of {max(silence_seconds(r), 0):.0f} s ago"
    s = r["summary"]
    videos = f"{s['done']} done, {s['filtered']} filtered, {s['quarantined']} quarantined, {s['pending']} pending"
    made = f"{s['version']}, {s['clips']} clips; " if s["version"] else ""
    counted = f"{made}videos: {videos}" if s["videos"] else f"{s['decoded_videos']} videos decoded"
    why = f"; {str(r['error']).splitlines()[0][:200]}" if r.get("error") else ""
    return f"{counted}; {s['seconds']:.1f} s{why}"


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
    if r.get("submission"):
        lines.append(f"  submitted to a Ray cluster as {r['submission']}")
    watch = r.get("watch") or {}
    for stage, c in (r.get("stages") or {}).items():
        frames = f", {c['frames_decoded']} frames" if c["frames_decoded"] else ""
        bad = f", {c['quarantined']} quarantined" if c["quarantined"] else ""
        lines.append(f"  {stage:<12} {c['done']:>8} of {c['total']} {c['unit']}{frames}{bad}, {c['seconds']:.1f} s")
        seen = watch.get("stages", {}).get(stage)
        lines += [f"    {line}" for line in (stage_lines(seen) if seen else [])]
    lines += [f"  {line}" for line in (job_lines(watch) if watch else [])]
    if r.get("error"):
        lines.append(f"  {r['error']}")
    return "\n".join(lines)


def _clock(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
