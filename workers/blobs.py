"""Media of a VideoStage's inputs, read row by row when the stage asks for it: never a whole video at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from videoflow.errors import BadSample, MediaError
from videoflow.loader.reader import BlobRef, ClipReader, ClipRef
from videoflow.store.reader import PART, ROW_ID
from videoflow.timeline import Grid
from videoflow.unit import Unit

_NO_GRID = Grid(0, Fraction(1), Fraction(1))


class Blobs:
    """The ``data`` of the rows of some tables that a unit reads."""

    def __init__(self, unit: Unit, names: Sequence[str]) -> None:
        options = unit.root.lance_options()
        self._readers = {
            name: ClipReader([unit.root.uri(p) for p in unit.tables[name]], options, what=name)
            for name in names
            if name in unit.tables
        }

    def of(
        self, video_key: str, rows: Mapping[str, list[dict[str, Any]]]
    ) -> Callable[[str], Iterator[tuple[dict[str, Any], bytes]]]:
        """What `videoflow.stage.Item.blobs` is for one video."""

        def read(name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
            for row in sorted(rows.get(name, []), key=lambda r: r["chunk"]):
                ref = BlobRef(row[PART], row[ROW_ID], 0, row["offsets"][-1])
                try:
                    ((data,),) = self._readers[name].read_ranges([ClipRef(video_key, (ref,), _NO_GRID, 0, 0)])
                except BadSample as e:
                    raise MediaError("io_error", f"its rows of {name} are damaged: {e}") from e
                yield row, data

        return read
