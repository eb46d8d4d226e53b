"""What commands print for programs: strict JSON, one object a line, whatever the values are."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from videoflow.errors import DamagedCatalog


def json_line(value: Any) -> str:
    """One line of JSON that every parser takes: NaN and infinities are null, dates and the like are text."""
    return json.dumps(_strict(value), default=str, allow_nan=False)


def print_json(value: Any) -> None:
    """A line of the answer, on stdout."""
    print(json_line(value))


def tell_damage(lines: Sequence[str]) -> None:
    """After an answer that had to leave damaged records out: name them on stderr, and fail.

    Raises:
        DamagedCatalog: the last of them.
    """
    for line in lines[:-1]:
        print(f"videoflow: {' '.join(line.split())}", file=sys.stderr)
    if lines:
        raise DamagedCatalog(lines[-1])


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
