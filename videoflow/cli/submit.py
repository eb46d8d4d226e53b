"""``submit``: what ``run`` does, on a running Ray cluster, through Ray Jobs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from videoflow import recipe as recipes
from videoflow.cli.progress import say
from videoflow.cli.run import (
    EngineOpt,
    JsonOpt,
    MemoryOpt,
    NameOpt,
    QuarantineOpt,
    RecipeArg,
    SetOpt,
    SourceOpt,
    WorkersOpt,
    parse_bytes,
    parse_percent,
)
from videoflow.cli.stop import Stopped
from videoflow.dataset.catalog import check_name
from videoflow.errors import InputError, SourceError, SystemFailure
from videoflow.jobs import ENDED, FAILED, RayJobs, exit_code, why_failed
from videoflow.submission import Submission, submission_of_run
from videoflow.unit import engine_path

RootOpt = Annotated[
    str, typer.Option("--root", metavar="ROOT", help="The catalog: a URL, or a folder that all nodes share.")
]
AddressOpt = Annotated[
    str | None,
    typer.Option("--address", metavar="URL", help="The cluster's dashboard, e.g. http://head:8265."),
]
PythonOpt = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="The cluster's interpreter that has videoflow; found unless told."),
]
WithOpt = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="PATH", help="A file or folder of yours to take along; may be repeated."),
]
FollowOpt = Annotated[
    bool, typer.Option("-f", "--follow", "--wait", help="Print what the job says until it has ended; exit as it does.")
]
POLL_SECONDS = 1.0
#: So often in a row the cluster may not answer while a job is followed.
MAX_SILENT_POLLS = 30


def register(app: typer.Typer) -> None:
    app.command("submit")(submit)


def submit(
    recipe: RecipeArg,
    root: RootOpt,
    name: NameOpt,
    address: AddressOpt = None,
    source: SourceOpt = None,
    settings: SetOpt = None,
    engine: EngineOpt = "ray",
    workers: WorkersOpt = None,
    memory: MemoryOpt = None,
    max_quarantined: QuarantineOpt = "10%",
    python: PythonOpt = None,
    take: WithOpt = None,
    follow: FollowOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Have a running Ray cluster do what `run` does. The address may also stand in RAY_ADDRESS.

    Exit codes: 0 submitted; 2 wrong input, or the cluster refuses; 4 it cannot be reached. With --follow those of run.
    Ctrl-C while following leaves the job alone.
    """
    check_name(name)
    parse_percent(max_quarantined)
    parse_bytes(memory)
    if ":" not in engine:
        engine_path(engine)
    chosen = recipes.load(recipe).with_settings(settings or [])
    if not (source or chosen.sources):
        raise SourceError("no sources: give --source or list them in the recipe under sources:")
    client = RayJobs(_address(address))
    options = ["--engine", engine, "--max-quarantined", max_quarantined]
    options += ["--workers", str(workers)] if workers else []
    options += ["--memory", memory] if memory else []
    options += ["--json"] if as_json and follow else []
    submission = submission_of_run(
        chosen, source or [], root=root, name=name, options=options, take=take or [], python=python
    )
    hand_over(client, submission, root=root, as_json=as_json)
    if follow:
        raise typer.Exit(_follow(client, submission.job, root, as_json=as_json))


def hand_over(client: RayJobs, submission: Submission, *, root: str, as_json: bool) -> None:
    """Upload and submit, and tell how to go on from here."""
    version = client.version()
    for note in submission.notes:
        tell(f"note: {note}")
    package = client.upload(submission.digest, submission.package)
    job = submission.job
    client.submit(submission.entrypoint, submission=job, working_dir=package, metadata=submission.metadata)
    if as_json:
        print(json.dumps({"job": job, "submission": job, "address": client.address, "root": root}), flush=True)
        return
    say(f"submitted job {job} to {client.address} (Ray {version})")
    say(f"  follow it   videoflow status {root} {job} -f")
    say(f"  its output  videoflow logs {root} {job} --address {client.address}")
    say(f"  stop it     videoflow cancel {root} {job}")


def tell(text: str) -> None:
    """A line about the answer, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _address(given: str | None) -> str:
    named = os.environ.get("RAY_ADDRESS", "")
    address = given or (named if named.startswith(("http://", "https://")) else None)
    if address is None:
        raise InputError("no cluster: give --address http://head:8265, the dashboard of a running Ray cluster")
    return address


# -- following -------------------------------------------------------------------------------------------------------


def _follow(client: RayJobs, job: str, root: str, *, as_json: bool) -> int:
    """Print what a job says until it has ended; its exit code. With ``as_json`` only its last object is on stdout."""
    spoken: list[str] = []

    def out(text: str) -> None:
        spoken.append(text)
        print(text, end="", file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        info = _until_ended(client, job, out)
    except Stopped:
        raise Stopped(
            f"no longer following job {job}, which goes on: `videoflow status {root} {job} -f` follows it, "
            f"`videoflow cancel {root} {job}` stops it"
        ) from None
    except SystemFailure as e:
        raise SystemFailure(
            f"lost sight of job {job}, which may go on (`videoflow status {root} {job}` tells): {e}"
        ) from e
    code = exit_code(info)
    if info["status"] == FAILED and info.get("driver_exit_code") != code:
        raise SystemFailure(f"job {job} did not end as videoflow does: {why_failed(info)}")
    if as_json and (last := _last_object("".join(spoken))):
        print(last)
    return code


def _until_ended(client: RayJobs, job: str, out: Callable[[str], None]) -> dict[str, Any]:
    said, silent = "", 0
    while True:
        try:
            info = client.info(job)
            text = client.logs(job)
            silent = 0
        except SystemFailure:
            silent += 1
            if silent >= MAX_SILENT_POLLS:
                raise
            time.sleep(POLL_SECONDS)
            continue
        if info is None:
            raise SystemFailure(f"{client.address} no longer knows job {job}: its head was started anew")
        out(text[len(said) :] if text.startswith(said) else text)
        said = text
        if info["status"] in ENDED:
            return info
        time.sleep(POLL_SECONDS)


def _last_object(text: str) -> str | None:
    """The last line that is a JSON object with a job in it: what `run --json` ends with."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                if "job" in json.loads(line):
                    return line
    return None
