"""Commands about what went wrong: ``quarantine list`` and ``quarantine retry``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from videoflow.cli.data import RootArg
from videoflow.cli.output import print_json
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt
from videoflow.dataset.catalog import Catalog
from videoflow.dataset.retry import retry_quarantined
from videoflow.errors import printable_text

quarantine_app = typer.Typer(help="Inputs that could not be used, with class and message.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(quarantine_app, name="quarantine")


@quarantine_app.command("list")
def list_quarantined(root: RootArg, as_json: JsonOpt = False) -> None:
    """List quarantined sources, one a line."""
    rows = Catalog.open(root).quarantine()
    for row in sorted(rows, key=lambda r: r["uri"]):
        if as_json:
            print_json(row)
        else:
            say(f"{printable_text(row['uri'])}\n    {row['class']} (stage {row['stage']}): {row['message']}")
    if not rows and not as_json:
        say("nothing is quarantined")


@quarantine_app.command("retry")
def retry(
    root: RootArg,
    classes: Annotated[
        list[str] | None, typer.Option("--class", metavar="C", help="Only of this class; may be repeated.")
    ] = None,
    uri: Annotated[str | None, typer.Option("--uri", metavar="U", help="Only of this source.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Let the next run try quarantined videos and clips again."""
    done = retry_quarantined(Catalog.open(root), classes=classes or (), uri=uri)
    if as_json:
        print_json(asdict(done))
        return
    say(f"{done.items} results of {done.videos} videos will be tried again by the next run that wants them")
    if done.unreadable:
        say(f"{done.unreadable} sources that could not be read are looked at by every run anyway")
