"""Commands about bytes: ``du`` and ``gc``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from videoflow.cli.data import RootArg
from videoflow.cli.output import print_json
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt, show_bytes
from videoflow.dataset.catalog import Catalog
from videoflow.jobrecord import oldest_running
from videoflow.store.gc import GRACE_DAYS, find_garbage, remove
from videoflow.store.usage import OTHER, TABLE, VERSION, Usage, usage

DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed and remove nothing.")]
#: Clocks of hosts and of stores differ a little, and some stores keep whole seconds: files count as a running job's own
#: from this long before its start.
CLOCK_MARGIN = timedelta(minutes=5)
GraceOpt = Annotated[
    float, typer.Option("--grace", metavar="DAYS", min=0, help="Spare what is younger than this many days.")
]


def register(app: typer.Typer) -> None:
    app.command("gc")(gc)
    app.command("du")(du)


def gc(root: RootArg, dry_run: DryRunOpt = False, grace: GraceOpt = GRACE_DAYS, as_json: JsonOpt = False) -> None:
    """Remove what killed runs left behind: files that no table names, used-up records, versions never published,
    writes never finished; and old versions of the tables themselves.

    Files of running jobs are spared whatever the grace time, and whole tables are never removed (see du).
    """
    catalog = Catalog.open(root)
    now = datetime.now(UTC)
    running = oldest_running(catalog.root)
    cutoff = min(now - timedelta(days=grace), running - CLOCK_MARGIN if running else now)
    garbage = find_garbage(catalog.root, catalog.ledger, cutoff=cutoff)
    if not dry_run:
        remove(catalog.root, garbage)
    num_bytes, counts = sum(g.num_bytes for g in garbage), Counter(g.kind for g in garbage)
    if as_json:
        for g in garbage:
            print_json({"kind": g.kind, "path": g.path, "files": len(g.objects), "bytes": g.num_bytes})
        print_json({"removed": not dry_run, "bytes": num_bytes, **{k: counts[k] for k in _KINDS}})
        return
    for g in garbage:
        say(f"{show_bytes(g.num_bytes):>10}  {_KINDS[g.kind]:<18} {g.path}")
    did = "would remove" if dry_run else "removed"
    say(f"{did} {len(garbage)} things, {show_bytes(num_bytes)}, last written before {cutoff:%Y-%m-%d %H:%M} UTC")


#: Kinds of garbage in words.
_KINDS = {
    "data": "unused data file",
    "manifest": "replaced versions",
    "staging": "used-up record",
    "version": "unpublished version",
    "unfinished": "unfinished write",
}


def du(root: RootArg, as_json: JsonOpt = False) -> None:
    """Say what lies in the catalog: bytes, rows and fragments of every table, and which versions use it."""
    catalog = Catalog.open(root)
    lines = usage(catalog.root, catalog.ledger, now=datetime.now(UTC))
    total, orphans = sum(u.num_bytes for u in lines), sum(u.orphan_bytes for u in lines)
    reclaimable = sum(u.num_bytes for u in lines if u.is_reclaimable)
    if as_json:
        for u in lines:
            print_json({**asdict(u), "reclaimable": u.is_reclaimable})
        print_json({"kind": "total", "bytes": total, "orphan_bytes": orphans, "reclaimable_bytes": reclaimable})
        return
    say(f"{'bytes':>10} {'unused':>10} {'rows':>9} {'fragments':>9}  what")
    for u in sorted(lines, key=lambda u: ((TABLE, VERSION, OTHER).index(u.kind), u.path)):
        say(
            f"{show_bytes(u.num_bytes):>10} {show_bytes(u.orphan_bytes):>10} {u.rows:>9} {u.fragments:>9}  "
            f"{u.path}{_told(u)}"
        )
    say(f"{show_bytes(total):>10} {show_bytes(orphans):>10}  in all; unused bytes go with `videoflow gc {root}`")
    if reclaimable:
        say(f"{show_bytes(reclaimable)} reclaimable: tables of older fingerprints that no version uses; remove their")
        say("folders to free it, a run that wants them again computes them again")


def _told(u: Usage) -> str:
    if u.kind != TABLE:
        return ""
    users = f"in {', '.join(u.versions)}" if u.versions else "in no version"
    return f"  stage {u.stage or '?'}, {users}{'; reclaimable by rm' if u.is_reclaimable else ''}"
