"""One picture of a version's clips: the first cached frame of each, with its file's name and its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TILE_WIDTH, TILE_HEIGHT, CAPTION_HEIGHT, GAP = 240, 160, 36, 8
INK, PAPER = (235, 235, 235), (28, 28, 28)


@dataclass(frozen=True)
class Tile:
    """One clip on the sheet. ``picture``: uint8 (TILE_HEIGHT, TILE_WIDTH, 3) RGB; captions are drawn below it."""

    picture: np.ndarray
    captions: tuple[str, str]


def tiles_of(version: Any, *, limit: int = 60) -> list[Tile]:
    """The first frame of every clip through the loader, in the order of files and times.

    Args:
        version: a dataset version (``videoflow.open(root).version("name@n")``).
        limit: most tiles on one sheet; a version with more shows its first ones.
    """
    rows = version.clips(columns=["clip_key", "uri", "t0_us", "t1_us"]).to_pylist()
    rows = sorted(rows, key=lambda r: (r["uri"], r["t0_us"], r["t1_us"]))[:limit]
    wanted = {r["clip_key"] for r in rows}
    pictures: dict[str, np.ndarray] = {}
    options = {
        "frames": 1,
        "size": (TILE_HEIGHT, TILE_WIDTH),
        "fit": "pad",
        "shuffle": False,
        "epochs": 1,
        "tail": "pad",
    }
    with version.loader(batch_size=min(16, max(1, len(rows))), **options) as loader:
        for batch in loader:
            for key, video in zip(batch["clip_key"], batch["video"], strict=True):
                if key in wanted:  # an empty slot of the last batch has no key
                    pictures[key] = np.asarray(video[0]).transpose(1, 2, 0)
            if len(pictures) == len(wanted):
                break
    return [Tile(pictures[r["clip_key"]], _captions(r)) for r in rows if r["clip_key"] in pictures]


def draw(tiles: Sequence[Tile], path: Path, *, columns: int = 6) -> None:
    """Write the sheet as a PNG or JPEG file, by the path's suffix."""
    import cv2

    columns = max(1, min(columns, len(tiles)))
    num_rows = -(-len(tiles) // columns)
    height = num_rows * (TILE_HEIGHT + CAPTION_HEIGHT + GAP) + GAP
    sheet = np.full((height, columns * (TILE_WIDTH + GAP) + GAP, 3), PAPER, np.uint8)
    for i, tile in enumerate(tiles):
        x = GAP + (i % columns) * (TILE_WIDTH + GAP)
        y = GAP + (i // columns) * (TILE_HEIGHT + CAPTION_HEIGHT + GAP)
        sheet[y : y + TILE_HEIGHT, x : x + TILE_WIDTH] = tile.picture
        for line, text in enumerate(tile.captions):
            at = (x, y + TILE_HEIGHT + 14 + 16 * line)
            cv2.putText(sheet, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.42, INK, 1, cv2.LINE_AA)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), sheet[:, :, ::-1]):
        raise OSError(f"cannot write the contact sheet {path}")


def _captions(row: Mapping[str, Any]) -> tuple[str, str]:
    name = row["uri"].rstrip("/").rsplit("/", 1)[-1]
    name = name.encode("ascii", "replace").decode()  # the font has no other letters
    if len(name) > 30:
        name = f"{name[:18]}..{name[-10:]}"
    return name, f"{row['t0_us'] / 1e6:.2f} s - {row['t1_us'] / 1e6:.2f} s"
