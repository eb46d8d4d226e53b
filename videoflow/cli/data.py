"""Commands that ask: ``versions``, ``query``, ``search``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import pyarrow as pa
import typer

from videoflow.cli.output import print_json, tell_damage
from videoflow.cli.progress import say
from videoflow.cli.run import JsonOpt
from videoflow.dataset.catalog import Catalog
from videoflow.errors import printable_text

RootArg = Annotated[str, typer.Argument(metavar="ROOT", help="The catalog's root.")]
VersionArg = Annotated[str, typer.Argument(metavar="NAME@N", help="A version; a name alone is its newest.")]
#: Rows shown of an answer without --json; the rest is counted.
MAX_ROWS_SHOWN = 100


def register(app: typer.Typer) -> None:
    app.command("versions")(versions)
    app.command("query")(query)
    app.command("search")(search)


def versions(root: RootArg, as_json: JsonOpt = False) -> None:
    """List the dataset versions of a catalog."""
    bad: list[str] = []
    found = Catalog.open(root).versions(bad=bad)
    for v in found:
        if as_json:
            print_json({"version": v.id, **asdict(v)})
        else:
            say(f"{v.id:<24} {v.clips:>9} clips {v.videos:>8} videos  {v.created}  recipe {v.recipe}")
    if not found and not bad and not as_json:
        say("no versions yet; `videoflow run` publishes one")
    tell_damage(bad)


def query(
    root: RootArg,
    version: VersionArg,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query over the table clips.")],
    as_json: JsonOpt = False,
) -> None:
    """Ask a version in SQL (DuckDB); the table is called clips."""
    table = Catalog.open(root).version(version).sql(sql)
    if as_json:
        for row in table.to_pylist():
            print_json(row)
        return
    say(format_table(table))


def search(
    root: RootArg,
    version: VersionArg,
    clip: Annotated[str, typer.Option("--clip", metavar="KEY", help="The clip to compare with.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many clips.")] = 10,
    as_json: JsonOpt = False,
) -> None:
    """Find the clips most like one clip, by the cosine of their embeddings."""
    rows = Catalog.open(root).version(version).search(clip, k)
    if as_json:
        for row in rows:
            print_json(row)
        return
    say(format_table(pa.Table.from_pylist(rows)) if rows else "no other clip with an embedding")


def format_table(table: pa.Table) -> str:
    """Columns aligned as text, for people; long values cut."""
    rows = [[_cell(v) for v in row.values()] for row in table.slice(0, MAX_ROWS_SHOWN).to_pylist()]
    widths = [max([len(name), *(len(r[i]) for r in rows)]) for i, name in enumerate(table.column_names)]
    lines = ["  ".join(n.ljust(w) for n, w in zip(table.column_names, widths, strict=True)).rstrip()]
    lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    if len(table) > MAX_ROWS_SHOWN:
        lines.append(f"… {len(table) - MAX_ROWS_SHOWN} more rows (all of them with --json, or add LIMIT)")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else printable_text(str(value))
    return text if len(text) <= 80 else text[:77] + "…"
