"""The commands of ``videoflow``, put together."""

from __future__ import annotations

import typer

from videoflow.cli import data, explain, health, jobs, run, store, submit

app = typer.Typer(
    name="videoflow",
    help="Decode video once, cache it in Lance, train from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
run.register(app)
submit.register(app)
jobs.register(app)
explain.register(app)
data.register(app)
health.register(app)
store.register(app)
