"""What is asked for again, what counts at once, and when a host is down."""

from __future__ import annotations

import pytest

from videoflow import persist as p
from videoflow.errors import SystemFailure


class NoCredentialsError(Exception):
    """Named like botocore's."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "WAIT_SECONDS", 0)


def failing(times: int, error: Exception):  # type: ignore[no-untyped-def]
    calls = []

    def read() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return read, calls


def test_a_moments_failure_does_not_count() -> None:
    read, _ = failing(2, TimeoutError("slow"))
    assert p.persist(read) == 3


@pytest.mark.parametrize(
    ("error", "tries"), [(OSError("down"), 3), (FileNotFoundError("gone"), 1), (ValueError("odd"), 3)]
)
def test_what_stays_wrong_is_raised(error: Exception, tries: int) -> None:
    read, calls = failing(9, error)
    with pytest.raises(OSError):
        p.persist(read)
    assert len(calls) == tries


def test_missing_credentials_stop_the_job_at_once() -> None:
    read, calls = failing(9, NoCredentialsError("Unable to locate credentials"))
    with pytest.raises(SystemFailure, match="credentials"):
        p.persist(read)
    assert len(calls) == 1


def test_three_in_a_row_of_one_host_stop_the_job() -> None:
    watch, down = p.HostWatch(), OSError("connection refused")
    watch.failed("s3://a/1", down)
    watch.failed("s3://b/1", down)
    watch.failed("s3://a/2", down)
    watch.ok("s3://a/3")
    watch.failed("s3://a/4", down)
    for name in "567":  # files that are not there say nothing about their host
        watch.failed(f"s3://a/{name}", FileNotFoundError("gone"))
    watch.failed("s3://a/8", down)
    with pytest.raises(SystemFailure, match="s3://a in a row"):
        watch.failed("s3://a/9", down)
