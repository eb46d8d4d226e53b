"""Commands about what went wrong: ``quarantine list``."""

from __future__ import annotations

import json

import typer

from videoflow.cli.data import RootArg
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt
from videoflow.dataset.catalog import Catalog

quarantine_app = typer.Typer(help="Inputs that could not be used, with class and message.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(quarantine_app, name="quarantine")


@quarantine_app.callback()
def _group() -> None:
    """Keeps `list` a command of its own while it is the only one."""


@quarantine_app.command("list")
def list_quarantined(root: RootArg, as_json: JsonOpt = False) -> None:
    """List quarantined sources, one a line."""
    rows = Catalog.open(root).quarantine()
    for row in sorted(rows, key=lambda r: r["uri"]):
        if as_json:
            print(json.dumps(row, ensure_ascii=False))
        else:
            say(f"{row['uri']}\n    {row['class']} (stage {row['stage']}): {row['message']}")
    if not rows and not as_json:
        say("nothing is quarantined")
