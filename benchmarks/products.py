"""What a model eats, measured: sound beside its picture, tokens beside frames, payloads as H.264 and as JPEG.

    python -m benchmarks.products [--json]

Each part runs in a process of its own, with its own defaults: products_audio, products_tokens, products_payload. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import footage
from benchmarks.measure import run

PARTS = ("audio", "tokens", "payload")
#: What was promised to be printed: (bound, "≥" or "≤"), or None where a figure is only to be known.
FIGURES: dict[str, tuple[float, str] | None] = {
    "av_offset_samples_max": (1.0, "≤"),
    "tokens_vs_frames": (10.0, "≥"),
    "patch_vq_psnr": None,
    "payload_bytes_per_second": None,
    "payload_decode_cost": None,
    "jpeg_decode_cost": None,
}


def measure() -> dict[str, Any]:
    """All figures of all parts, those of `FIGURES` first.

    Raises:
        RuntimeError: a part failed, or did not print a figure that it owes.
    """
    found: dict[str, Any] = {}
    for part in PARTS:
        print(f"{part} …", file=sys.stderr, flush=True)
        done = run([sys.executable, "-m", f"benchmarks.products_{part}", "--json"], core=None, cwd=footage.REPOSITORY)
        found |= json.loads(done.output.splitlines()[-1])
    if missing := [name for name in FIGURES if name not in found]:
        raise RuntimeError(f"not printed: {', '.join(missing)}")
    return {name: found[name] for name in [*FIGURES, *(n for n in found if n not in FIGURES)]}


def holds(name: str, value: float) -> str:
    bound = FIGURES.get(name)
    if bound is None:
        return "–"
    limit, side = bound
    return "yes" if (value >= limit if side == "≥" else value <= limit) else "NO"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object, last")
    o = p.parse_args()
    figures = measure()
    table = Table("figure", "value", "bound", "holds", title="products")
    for name, value in figures.items():
        bound = FIGURES.get(name)
        table.add_row(name, str(value), f"{bound[1]} {bound[0]:g}" if bound else "–", holds(name, value))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)
    if o.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
