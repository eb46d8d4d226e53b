"""Commands that compute: ``plan`` and ``run``."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from fractions import Fraction
from typing import Annotated, Any

import typer

from videoflow import recipe as recipes
from videoflow.chosen import check_choices
from videoflow.cli.output import print_json
from videoflow.cli.progress import make_progress, say
from videoflow.dataset.catalog import Catalog, check_name
from videoflow.errors import InputError, SourceError, shown
from videoflow.estimate import Estimate, estimate
from videoflow.execute import JobOptions, JobSummary
from videoflow.forecast import StageForecast, forecast
from videoflow.identify import identify
from videoflow.job import Job
from videoflow.jobrecord import record_path
from videoflow.jobs import submitted
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.store.layout import Root
from videoflow.telemetry.outlets import appending, serving
from videoflow.telemetry.watch import JobWatch
from videoflow.unit import engine_path

RecipeArg = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name (clips) or a .yaml or .py file.")]
SourceOpt = Annotated[
    list[str] | None,
    typer.Option("--source", metavar="S", help="Folder, glob, file, URL or manifest; may be repeated."),
]
RootOpt = Annotated[str, typer.Option("--root", metavar="ROOT", help="The catalog: a folder, made if it is not there.")]
NameOpt = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the dataset version that is published.")]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a parameter, e.g. clips.max_seconds=5; may be repeated."),
]
EngineOpt = Annotated[str, typer.Option("--engine", metavar="ray|local", help="What runs the work.")]
WorkersOpt = Annotated[int | None, typer.Option("--workers", help="Workers; one a core unless told.")]
MemoryOpt = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory that decoding one video may take; 4GiB unless told."),
]
QuarantineOpt = Annotated[
    str, typer.Option("--max-quarantined", metavar="P%", help="Exit code 3 if more videos than this are quarantined.")
]
MetricsPortOpt = Annotated[
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        envvar="VIDEOFLOW_METRICS_PORT",
        help="Serve Prometheus metrics at /metrics while the job runs; on this machine only unless HOST is given.",
    ),
]
MetricsFileOpt = Annotated[
    str | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE",
        envvar="VIDEOFLOW_METRICS_FILE",
        help="Append a line of JSON with all figures every few seconds.",
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="For scripts: JSON on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
    app.command("run")(run)


def plan(
    recipe: RecipeArg,
    root: RootOpt,
    name: NameOpt,
    source: SourceOpt = None,
    settings: SetOpt = None,
    engine: EngineOpt = "ray",
    workers: WorkersOpt = None,
    max_quarantined: QuarantineOpt = "10%",
    as_json: JsonOpt = False,
) -> None:
    """Say what a run would compute, reuse and skip, with an estimate of disk and, from past jobs, of time. Computes
    and writes nothing.
    """
    check_name(name)
    options = JobOptions(engine, workers, None, parse_percent(max_quarantined))
    engine_path(engine)
    chosen = recipes.load(recipe).with_settings(settings or [])
    catalog = _catalog_or_scratch(root)
    built = chosen.build()
    check_choices(built)
    sources = [*chosen.sources, *(source or [])]
    if not sources:
        raise SourceError("no sources: give --source or list them in the recipe under sources:")
    found = scan(sources)
    identified = identify(catalog, found, job=None)
    the_plan = Plan(catalog.root, catalog.ledger, chosen, built, identified.videos)
    stages = forecast(the_plan)
    to_decode = {v.video_key: v for videos in the_plan.missing_products().values() for v in videos}
    cores = options.workers or len(os.sched_getaffinity(0))
    cost = estimate(catalog, the_plan, stages, list(to_decode.values()), workers=cores)
    result: dict[str, Any] = {
        "videos": len(identified.videos) + len(identified.unreadable),
        "unreadable": len(identified.unreadable),
        "ignored": len(found.ignored),
        "to_decode": len(to_decode),
        "source_bytes_to_decode": sum(v.size for v in to_decode.values()),
        "estimated_decode_hours": None if cost.video_seconds is None else cost.video_seconds / 3600,
        "estimated_decode_frames": cost.frames,
        "estimated_frame_cache_bytes": cost.frame_cache_bytes,
        "estimated_seconds": cost.stage_seconds,
        "estimated_workers": cost.workers,
        "estimated_from_jobs": cost.jobs,
        "stages": [asdict(s) for s in stages],
    }
    if as_json:
        print_json(result)
        return
    _print_plan(result, stages, cost)


def _print_plan(result: dict[str, Any], stages: list[StageForecast], cost: Estimate) -> None:
    to_decode = result["to_decode"]
    say(
        f"{result['videos']} videos ({result['unreadable']} unreadable, {result['ignored']} other files ignored); "
        f"{to_decode} to decode, {show_bytes(result['source_bytes_to_decode'])} of source"
    )
    head = f"{'stage':<12} {'of':<6} {'cached':>8} {'compute':>8} {'stale':>8} {'quarant.':>8}"
    say(f"{head}  after upstream; what changed")
    for s in stages:
        told = [f"+ those of {s.unknown} videos"] if s.unknown else []
        told += [f"{show_seconds(s.seconds)} of source, about {show_bytes(s.num_bytes)}"] if s.seconds else []
        told += [", ".join(s.changed)] if s.changed else []
        counts = f"{s.cached:>8} {s.to_compute:>8} {s.stale:>8} {s.quarantined:>8}"
        say(f"{s.stage:<12} {s.grain + 's':<6} {counts}  {'; '.join(told)}".rstrip())
    if not to_decode:
        say("nothing to decode")
    elif cost.video_seconds is None or cost.frames is None:
        say("to decode: of unknown length, the files are not on this machine and the catalog knows none like them")
    else:
        cache = (
            ""
            if cost.frame_cache_bytes is None
            else f"; frame cache to write: about {show_bytes(cost.frame_cache_bytes)}"
        )
        say(f"to decode: about {show_seconds(cost.video_seconds)} of video, {cost.frames} frames{cache}")
    if cost.stage_seconds:
        say(_time(cost))


def _time(cost: Estimate) -> str:
    """The line about time: what is known of each stage that has something to do."""
    known = {k: v for k, v in cost.stage_seconds.items() if v is not None}
    unknown = [k for k in cost.stage_seconds if k not in known]
    if not known:
        return "time: not known before a job over this catalog has ended"
    parts = ", ".join(f"{k} {show_seconds(v)}" for k, v in known.items())
    more = f"; and {', '.join(unknown)}: not known yet" if unknown else ""
    jobs = "the past job" if cost.jobs == 1 else f"{cost.jobs} past jobs"
    return f"time: about {show_seconds(sum(known.values()))} by {cost.workers} workers as in {jobs} ({parts}){more}"


def run(
    recipe: RecipeArg,
    root: RootOpt,
    name: NameOpt,
    source: SourceOpt = None,
    settings: SetOpt = None,
    engine: EngineOpt = "ray",
    workers: WorkersOpt = None,
    memory: MemoryOpt = None,
    max_quarantined: QuarantineOpt = "10%",
    metrics_port: MetricsPortOpt = None,
    metrics_file: MetricsFileOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Compute what is missing and publish a dataset version of exactly these sources' clips.

    Exit codes: 0 finished; 2 wrong input; 3 too many quarantined (the version is published all the same), or no clip
    came of it (no version is); 4 the system failed, run again to resume; 130 Ctrl-C, run again to resume.
    """
    chosen = recipes.load(recipe).with_settings(settings or [])
    options = JobOptions(engine, workers, parse_bytes(memory), parse_percent(max_quarantined))
    outlets = (metrics_port, metrics_file)
    run_job(chosen, source or [], root=root, name=name, options=options, as_json=as_json, outlets=outlets)


def run_job(
    recipe: Recipe,
    sources: list[str],
    *,
    root: str,
    name: str,
    options: JobOptions,
    as_json: bool,
    resumes: str | None = None,
    outlets: tuple[str | None, str | None] = (None, None),
) -> None:
    """Run a job in front of a user and exit with its code. ``outlets``: address and file for its metrics."""
    job, submission = _known_as(root)
    watch, (address, file) = JobWatch(), outlets
    with make_progress() as progress, serving(watch, address), appending(watch, file):
        watch.listen(progress.watched)
        summary = Job(
            recipe,
            sources,
            root=root,
            name=name,
            options=options,
            progress=progress,
            resumes=resumes,
            job=job,
            submission=submission,
            watch=watch,
        ).run()
    if as_json:
        print_json({k: getattr(summary, k) for k in JSON_KEYS})
    else:
        _print_summary(summary, recipe, root)
    raise typer.Exit(summary.exit_code)


def _known_as(root: str) -> tuple[str | None, str | None]:
    """A submitted job's id, unless an earlier command of the submission took it, and the submission's."""
    us = submitted()
    if us is None:
        return None, None
    where = Root.at(root)
    is_taken = us.job is not None and where.exists() and where.has(record_path(us.job))
    return (None if is_taken else us.job), us.submission


#: The object that `run --json` prints as its last line.
JSON_KEYS = (
    "job",
    "version",
    "videos",
    "done",
    "filtered",
    "quarantined",
    "ignored",
    "pending",
    "decoded_videos",
    "frames_decoded",
    "decoded_intervals",
    "intervals_from_start",
    "clips",
    "seconds",
)


def _print_summary(s: JobSummary, recipe: Recipe, root: str) -> None:
    say(f"job {s.job} · recipe {recipe.name} · {s.seconds:.1f} s")
    say(
        f"videos    {s.videos}: {s.done} done, {s.filtered} filtered, {s.quarantined} quarantined, {s.pending} pending"
        f" ({s.ignored} other files ignored, {s.duplicates} more names of the same bytes)"
    )
    say(f"decoded   {s.decoded_videos} videos, {s.frames_decoded} frames")
    if s.decoded_intervals:
        say(f"again     {s.decoded_intervals} intervals, {s.intervals_from_start} of them from their video's start")
    if s.clips_without_frames:
        say(f"filtered  {s.clips_without_frames} clips that no cached frame falls into (no_cached_frame)")
    if s.version:
        what = "new" if s.is_new_version else "unchanged: it was there already"
        say(f"version   {s.version} ({what}), {s.clips} clips")
    if s.no_version:
        say(f"version   none: {s.no_version}")
    if s.quarantined:
        say(f"see why:  videoflow quarantine list {root}")


def _catalog_or_scratch(root: str) -> Catalog:
    """The catalog at a root; where there is none, an empty one that is thrown away (planning writes nothing)."""
    if Root.at(root).exists():
        return Catalog.open(root)
    import atexit
    import shutil
    import tempfile

    scratch = tempfile.mkdtemp(prefix="videoflow-plan-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return Catalog.open(scratch, create=True)


def parse_percent(text: str) -> float:
    """``10%`` or ``10`` as a share."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError as e:
        raise InputError(f"--max-quarantined {text!r} is not a percentage like 10%") from e
    if not 0 <= value <= 1:
        raise InputError(f"--max-quarantined {text!r} must lie between 0% and 100%")
    return value


def parse_bytes(text: str | None) -> int | None:
    """``2GB``, ``512MiB`` or plain bytes."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,9})?)\s*(?:([kmgt])(i?)b?)?", text.strip().lower())
    if not found:
        raise InputError(f"--memory {shown(text)} is not a size like 2GB or 512MiB")
    base = 1024 if found[3] else 1000
    return int(Fraction(found[1]) * base ** ("kmgt".index(found[2]) + 1 if found[2] else 0))


def show_seconds(seconds: float) -> str:
    """A time span for people."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def show_bytes(n: int) -> str:
    """A size for people."""
    size = float(n)
    for suffix in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or suffix == "TB":
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1000
    return ""
