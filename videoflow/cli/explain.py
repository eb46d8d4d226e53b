"""Command ``explain``: why one item is what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from videoflow import recipe as recipes
from videoflow.cli.data import RootArg
from videoflow.cli.output import print_json
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt, SetOpt
from videoflow.dataset.catalog import Catalog
from videoflow.errors import printable_text
from videoflow.explain import Answer, answers, find_subject, verdicts

KeyArg = Annotated[str, typer.Argument(metavar="KEY", help="A source's uri or path, a video key or a clip key.")]
RecipeOpt = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="Say what this recipe would compute, and why.")
]


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    root: RootArg, key: KeyArg, recipe: RecipeOpt = None, settings: SetOpt = None, as_json: JsonOpt = False
) -> None:
    """Say what is known of one video or clip, stage by stage, and why a recipe would compute something again."""
    chosen = recipes.load(recipe).with_settings(settings or []) if recipe else None
    catalog = Catalog.open(root)
    subject = find_subject(catalog, key)
    found = answers(catalog, subject)
    decided = verdicts(catalog, subject, chosen) if chosen else []
    if as_json:
        print_json({**asdict(subject), "kind": "subject"})
        for a in found:
            print_json({**asdict(a), "kind": "ledger"})
        for v in decided:
            print_json({**asdict(v), "kind": "verdict"})
        return
    clip = f"clip {subject.clip_key} of " if subject.clip_key else ""
    say(f"{clip}video {subject.video_key}")
    for uri in subject.uris:
        say(f"  {printable_text(uri)}")
    say("in the ledger, oldest first:" if found else "nothing in the ledger")
    for a in found:
        when = f"{a.at:%Y-%m-%d %H:%M:%S} UTC, job {a.job or '-'}"
        say(f"  {a.stage:<10} {a.fingerprint or '-':<32}  {_state(a)}  ({when})")
    if chosen:
        say(f"recipe {chosen.name}:")
    for v in decided:
        say(f"  {v.stage:<10} {v.fingerprint:<32}  {v.what}")


def _state(a: Answer) -> str:
    if sum(a.items.values()) > 1:
        return ", ".join(f"{n} {state}" for state, n in sorted(a.items.items()))
    why = f" {a.reason}" if a.reason else ""
    return f"{a.state}{why}{f': {a.message}' if a.message else ''}, {a.rows} rows"
