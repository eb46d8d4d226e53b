"""The bytes of a source where the decoder can open them: its own file, or a temporary copy of a remote object."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from videoflow.errors import MOVED_UNDER_THE_JOB, MediaError
from videoflow.persist import HostWatch, persist, told
from videoflow.telemetry.meter import metered_entry
from videoflow.unit import DecodeItem


@metered_entry("fetch")
@contextlib.contextmanager
def fetched(item: DecodeItem, hosts: HostWatch) -> Iterator[str]:
    """A local path of the item's bytes: its own, or a temporary copy of a remote object.

    Raises:
        MediaError: ``io_error`` when it cannot be read or is no longer what was hashed.
        SystemFailure: its host is down, or there are no credentials.
    """
    if "://" not in item.path:
        _check_stamp(item)
        yield item.path
        _check_stamp(item)
        return
    from videoflow.sources import filesystem

    fs, remote = filesystem(item.path)
    suffix = Path(remote).suffix
    with tempfile.NamedTemporaryFile(prefix="videoflow-fetch-", suffix=suffix) as local:
        try:
            persist(lambda: fs.get_file(remote, local.name))
        except OSError as e:
            hosts.failed(item.path, e)
            raise MediaError("io_error", f"cannot fetch the object: {type(e).__name__}: {told(e)}") from e
        hosts.ok(item.path)
        yield local.name


def _check_stamp(item: DecodeItem) -> None:
    try:
        info = os.stat(item.path)
    except OSError as e:
        raise MediaError("io_error", f"{MOVED_UNDER_THE_JOB} ({e.strerror}); run again") from e
    if (info.st_size, f"mtime:{info.st_mtime_ns}") != (item.size, item.stamp):
        raise MediaError("io_error", f"{MOVED_UNDER_THE_JOB}; run again")
