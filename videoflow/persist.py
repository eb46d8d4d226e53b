"""Talking to what may fail for a moment: asked again before it counts, and told apart from a host that is down.

The one home of how often and how long: sources (through fsspec), small objects (through obstore) and Lance tables. One
unreadable source is that source's own fault; three of one host in a row are the host's, and credentials that are
refused or a host that does not answer are nobody's fault but the system's: the job stops, and can be resumed.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from videoflow.errors import SystemFailure, VideoflowError

T = TypeVar("T")

TRIES = 3
WAIT_SECONDS = 0.5
#: What a store's client does by itself, request by request, before one of our own tries has failed: nine requests of
#: which one in ten fails all fail once in 10^9.
REQUEST_RETRIES = 8
REQUEST_BACKOFF_SECONDS, REQUEST_TIMEOUT_SECONDS = 5, 60
#: Asking again does not help.
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
IN_A_ROW = 3
#: Errors of storage clients that say the credentials are wrong, or that nobody answers, by class name: no client is
#: imported for that.
CREDENTIAL_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "RefreshError", "ProfileNotFound"}
)
UNREACHABLE_ERRORS = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
#: What S3 and its like answer to credentials that are wrong for everything, not just for one object.
REFUSED = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired|RequestTimeTooSkewed"
)
_UNREACHABLE = re.compile(r"error sending request|error trying to connect|dns error|Connection refused")
_CODE = re.compile(r"<Code>(\w+)</Code>")
#: Lance names the line of its own source, obstore appends a dump of its structures.
_NOISE = re.compile(r",? ?/\S+\.rs:\d+(?::\d+)?|Debug source:.*|LanceError\(\w+\): |<\?xml.*", re.DOTALL)
_SIGNED = re.compile(r"((?:X-Amz-[\w-]+|AWSAccessKeyId|Signature|sig)=)[^&\s\"']+", re.IGNORECASE)
_HIDDEN: set[str] = set()


def obstore_options() -> dict[str, Any]:
    """The policy in obstore's words (``retry_config``)."""
    return {
        "max_retries": REQUEST_RETRIES,
        "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_SECONDS),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=REQUEST_BACKOFF_SECONDS)},
    }


def lance_options() -> dict[str, str]:
    """The policy in Lance's words (among ``storage_options``)."""
    return {
        "client_max_retries": str(REQUEST_RETRIES),
        "client_retry_timeout": str(REQUEST_TIMEOUT_SECONDS),
        "download_retry_count": str(REQUEST_RETRIES),
    }


def fsspec_options(url: str) -> dict[str, Any]:
    """The policy in the words of a URL's fsspec driver."""
    if not url.startswith(("s3://", "s3a://")):
        return {}
    return {"config_kwargs": {"retries": {"max_attempts": REQUEST_RETRIES + 1, "mode": "standard"}}}


def persist(read: Callable[[], T]) -> T:
    """The result of ``read``, tried three times.

    Raises:
        OSError: the last one. SystemFailure: there are no valid credentials, or nobody answers.
    """
    for i in range(1, TRIES + 1):
        try:
            return read()
        except VideoflowError:
            raise
        except Exception as e:
            if is_refused(e):
                raise SystemFailure(f"no valid credentials: {told(e)}") from e
            if isinstance(e, PERMANENT):
                raise
            if i == TRIES and type(e).__name__ in UNREACHABLE_ERRORS:
                raise SystemFailure(f"nobody answers: {told(e)}; when it is back, run the same command again") from e
            if i == TRIES:
                if isinstance(e, OSError):
                    raise
                raise OSError(f"{type(e).__name__}: {told(e)}") from e
        time.sleep(WAIT_SECONDS * 2 ** (i - 1))
    raise AssertionError("unreachable")


def insist(work: Callable[[], T], what: str) -> T:
    """The result of a step on a store that may be repeated, tried three times.

    Raises:
        SystemFailure: it failed for good; ``what`` begins its line ("cannot open …").
    """
    for i in range(1, TRIES + 1):
        try:
            return work()
        except (OSError, ValueError, RuntimeError) as e:  # Lance raises any of them for the same faults
            if i == TRIES or not is_passing(e):
                raise storage_failure(what, e) from e
        time.sleep(WAIT_SECONDS * 2 ** (i - 1))
    raise AssertionError("unreachable")


def is_refused(e: BaseException) -> bool:
    """Whether an error says that the credentials are missing or wrong for everything."""
    chain = [e, e.__cause__] if e.__cause__ else [e]
    return any(type(x).__name__ in CREDENTIAL_ERRORS or REFUSED.search(str(x)) for x in chain)


def is_passing(e: Exception) -> bool:
    """Whether a store's error may be gone a moment later: what is not there, not allowed or full stays so."""
    text = str(e)
    if "NoSuchUpload" in text:  # an upload that was completed, whose answer got lost
        return True
    if is_refused(e) or isinstance(e, PERMANENT) or (_UNREACHABLE.search(text) and "retries" in text):
        return False
    lasting = ("not found", "NoSuchBucket", "403 Forbidden", "401 Unauthorized", "No space left", "os error 28")
    return not any(t.lower() in text.lower() for t in lasting)


def hide(*secrets: str | None) -> None:
    """From now on these strings are masked in every error line."""
    _HIDDEN.update(s for s in secrets if s)


def told(e: BaseException, limit: int = 200) -> str:
    """An error as one short line without credentials."""
    text = " ".join(_NOISE.sub("", str(e)).split()) or type(e).__name__
    code = _CODE.search(str(e))
    if code:
        text = f"{text.rstrip(': ')} ({code[1]})"
    known = {v for k, v in os.environ.items() if k.startswith("AWS_") and k.endswith(("_KEY", "_KEY_ID", "_TOKEN"))}
    for secret in sorted(_HIDDEN | known, key=len, reverse=True):
        if len(secret) >= 4:
            text = text.replace(secret, "***")
    text = _SIGNED.sub(r"\1***", text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def storage_failure(what: str, e: BaseException) -> SystemFailure:
    """One line for a storage error, with what to do about it."""
    text, again = str(e), "and run the same command again"
    if getattr(e, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
        return SystemFailure(f"{what}: the disk is full; make room {again}")
    code = _CODE.search(text)
    why = f" ({code[1]})" if code else ""
    if REFUSED.search(text) or "403 Forbidden" in text or "401 Unauthorized" in text:
        return SystemFailure(f"{what}: the store refuses the credentials in use{why}; mend them {again}")
    if code and code[1] == "NoSuchBucket":
        return SystemFailure(f"{what}: there is no such bucket; make it {again}")
    if _UNREACHABLE.search(text):
        return SystemFailure(f"{what}: the store cannot be reached; see to its endpoint and network {again}")
    return SystemFailure(f"{what}: {told(e, 300)}")


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
                f"{count} sources of {host} in a row could not be read ({told(error, 150)}); "
                "when it is back, run the same command again"
            ) from error
