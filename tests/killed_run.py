"""``python -m tests.killed_run POINT NTH ARGS…``: `videoflow ARGS…` that kills itself (-9) at a step of the commit protocol.

POINT names the step; the process dies the NTH time it comes there. Kept out of the product: the steps are wrapped here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from videoflow.cli import main
from videoflow.store import commit, ledger
from videoflow.store.layout import Root
from workers import write_unit


def _die_at(nth: int) -> Callable[[], None]:
    left = [nth]

    def die() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def _wrap(
    owner: Any, name: str, die: Callable[[], None], *, before: bool, only: Callable[..., bool] | None = None
) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit = only is None or only(*args)
        if before and hit:
            die()
        result = real(*args, **kwargs)
        if not before and hit:
            die()
        return result

    setattr(owner, name, wrapped)


def _staging(root: Root, path: str, *rest: Any) -> bool:
    return path.startswith("staging/") and path.endswith(".json")


POINTS: dict[str, tuple[Any, str, bool, Any]] = {
    "before-write": (write_unit, "write_rows", True, None),
    "after-write": (write_unit, "write_rows", False, None),
    "after-stage": (Root, "put_new", False, _staging),
    "before-swap": (commit.Committer, "_swap", True, None),
    "after-swap": (commit.Committer, "_swap", False, None),
    "after-ledger": (ledger.Ledger, "append", False, None),
    "after-removal": (Root, "delete", False, _staging),
    "before-publish": (Root, "put_new", True, lambda root, path, *rest: path.endswith("version.json")),
}


def run() -> None:
    point, nth = sys.argv[1], int(sys.argv[2])
    owner, name, before, only = POINTS[point]
    _wrap(owner, name, _die_at(nth), before=before, only=only)
    sys.argv = ["videoflow", *sys.argv[3:]]
    main.main()


if __name__ == "__main__":
    run()
