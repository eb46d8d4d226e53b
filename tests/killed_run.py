"""``python -m tests.killed_run POINT[@STAGE] NTH SIGNAL ARGS…``: `videoflow ARGS…` that sends itself a signal at a step of
the commit protocol (SIGKILL: it dies; SIGSTOP: it stands still until somebody sends SIGCONT).

POINT names the step; the signal comes the NTH time the process comes there (with STAGE: with a unit of that stage). Kept
out of the product: the steps are wrapped here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from videoflow.cli import main
from videoflow.store import commit, ledger, writer
from videoflow.store.layout import Root
from workers import write_unit


def _signal_at(nth: int, number: signal.Signals) -> Callable[[], None]:
    left = [nth]

    def fire() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    return fire


def _wrap(
    owner: Any, name: str, fire: Callable[[], None], *, before: bool, only: Callable[..., bool] | None, stage: str
) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit = (only is None or only(*args)) and (not stage or stage in _stages(args))
        if before and hit:
            fire()
        result = real(*args, **kwargs)
        if not before and hit:
            fire()
        return result

    setattr(owner, name, wrapped)


def _stages(args: tuple[Any, ...]) -> set[str]:
    """The stages that a wrapped call is about."""
    found: set[str] = set()
    for a in args:
        if isinstance(a, writer.Target):
            found.add(a.stage)
        elif isinstance(a, str) and a.startswith("staging/"):
            found.add(a.split("/")[1])
        elif isinstance(a, list):
            found |= {entry[0] for entry in a if isinstance(entry, tuple)}
    return found


def _staging(root: Root, path: str, *rest: Any) -> bool:
    return path.startswith("staging/") and path.endswith(".json")


POINTS: dict[str, tuple[Any, str, bool, Any]] = {
    "before-write": (write_unit, "write_rows", True, None),
    "after-write": (write_unit, "write_rows", False, None),
    "before-stage": (Root, "put_new", True, _staging),
    "after-stage": (Root, "put_new", False, _staging),
    "before-swap": (commit.Committer, "_swap", True, None),
    "after-swap": (commit.Committer, "_swap", False, None),
    "after-ledger": (ledger.Ledger, "append", False, None),
    "after-removal": (Root, "delete", False, _staging),
    "before-publish": (Root, "put_new", True, lambda root, path, *rest: path.endswith("version.json")),
    "after-claim": (Root, "put_new", False, lambda root, path, *rest: path.endswith("claim")),
}


def run() -> None:
    point, _, stage = sys.argv[1].partition("@")
    owner, name, before, only = POINTS[point]
    fire = _signal_at(int(sys.argv[2]), signal.Signals[sys.argv[3]])
    _wrap(owner, name, fire, before=before, only=only, stage=stage)
    sys.argv = ["videoflow", *sys.argv[4:]]
    main.main()


if __name__ == "__main__":
    run()
