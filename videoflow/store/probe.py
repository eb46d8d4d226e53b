"""What a store can do, tried out once, when a catalog is made there: the commit protocol stands on two things.

*put_if_absent*: a second conditional put of one name is refused. *compare_and_swap*: of two commits to one version of a
Lance table, one is refused. Both are judged by what lies there afterwards, since an answer may get lost.
"""

from __future__ import annotations

import contextlib
import secrets

import pyarrow as pa
from lance.commit import CommitConflictError

from videoflow.errors import CatalogError, SystemFailure
from videoflow.persist import TRIES, is_passing, storage_failure
from videoflow.store.layout import Root, no_conditional_puts
from videoflow.store.writer import create_table, open_table, swap_fragments


def probe_store(root: Root) -> dict[str, bool]:
    """What catalog.json says of its store.

    Raises:
        CatalogError: the store cannot hold a catalog. SystemFailure: it cannot be reached.
    """
    path = f"staging/probe-{secrets.token_hex(8)}"
    try:
        if not _puts_once(root, f"{path}/record"):
            raise CatalogError(no_conditional_puts(root))
        if not _swaps_once(root, f"{path}/table.lance"):
            raise CatalogError(
                f"the store at {root.url} lets two commits to one version of a Lance table pass; a catalog there could "
                "lose data: use another store"
            )
    finally:
        with contextlib.suppress(SystemFailure):  # the first failure is the one to show; gc removes what is left
            for o in root.objects(path):
                root.delete(o.path)
            root.prune(path)
    return {"put_if_absent": True, "compare_and_swap": True}


def _puts_once(root: Root, path: str) -> bool:
    first, second = secrets.token_hex(8).encode(), secrets.token_hex(8).encode()
    root.put_new(path, first)
    return not root.put_new(path, second) and root.get(path) == first


def _swaps_once(root: Root, path: str) -> bool:
    create_table(root, path, pa.schema([("n", pa.int32())]))
    dataset = open_table(root, path)
    for i in range(2 * TRIES):
        try:
            swap_fragments(root, dataset, [], {"swap": str(i)})
        except OSError as e:  # a conflict is one
            if not isinstance(e, CommitConflictError) and not is_passing(e):
                raise storage_failure(f"cannot commit to {dataset.uri}", e) from e
    return bool(open_table(root, path).version == dataset.version + 1)
