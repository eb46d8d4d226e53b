"""Reading what may fail for a moment: asked for again before it counts, and told apart from a host that is down.

One unreadable source is that source's own fault; three of one host in a row are the host's (or the network's, or the
credentials'), and stop the job, which can be resumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from videoflow.errors import SystemFailure

T = TypeVar("T")

TRIES = 3
WAIT_SECONDS = 0.5
#: Asking again does not help.
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
IN_A_ROW = 3
#: Errors of storage clients that say the credentials are wrong, by class name: no client is imported for that.
CREDENTIAL_ERRORS = frozenset({"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "RefreshError"})


def persist(read: Callable[[], T]) -> T:
    """The result of ``read``, tried three times.

    Raises:
        OSError: the last one. SystemFailure: there are no valid credentials.
    """
    for i in range(1, TRIES + 1):
        try:
            return read()
        except PERMANENT:
            raise
        except OSError:
            if i == TRIES:
                raise
        except Exception as e:
            if type(e).__name__ in CREDENTIAL_ERRORS:
                raise SystemFailure(f"no valid credentials: {(str(e).splitlines() or [''])[0][:200]}") from e
            if i == TRIES:
                raise OSError(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}") from e
        time.sleep(WAIT_SECONDS * 2 ** (i - 1))
    raise AssertionError("unreachable")


def host_of(path: str) -> str:
    """Scheme and host (or bucket) of a URL; local files are one host."""
    return "{0.scheme}://{0.netloc}".format(urlsplit(path)) if "://" in path else "local files"


class HostWatch:
    """Counts failures in a row by host. A file that is not there says nothing about its host."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}
        self._lock = threading.Lock()

    def ok(self, path: str) -> None:
        with self._lock:
            self._failed.pop(host_of(path), None)

    def failed(self, path: str, error: Exception) -> None:
        """Count a failure.

        Raises:
            SystemFailure: the third in a row of this host.
        """
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return
        host = host_of(path).rsplit("@", 1)[-1]
        with self._lock:
            count = self._failed[host_of(path)] = self._failed.get(host_of(path), 0) + 1
        if count >= IN_A_ROW:
            raise SystemFailure(
                f"{count} sources of {host} in a row could not be read ({(str(error).splitlines() or [''])[0][:150]}); "
                "when it is back, run the same command again"
            ) from error
