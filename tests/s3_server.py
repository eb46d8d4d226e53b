"""A real S3 server (moto) and the faulty proxy in front of it, each as a process of its own on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

SECRET, KEY_ID = "very-secret-key-4711", "AKIDSOMEONE0815"


@dataclass(frozen=True)
class Server:
    """An S3 endpoint; ``environ`` is what a process needs to reach it."""

    url: str
    environ: dict[str, str] = field(repr=False)

    def set_mode(self, mode: str) -> None:
        """See `tests.faulty_proxy`."""
        urllib.request.urlopen(f"{self.url}/-/mode/{mode}", timeout=30).close()

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/-/counts", timeout=30) as answer:
            return json.load(answer)

    def full_environ(self) -> dict[str, str]:
        return {**os.environ, **self.environ}


def environ_of(url: str) -> dict[str, str]:
    """Endpoint and credentials, as they are given in practice."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def moto_server() -> Iterator[Server]:
    port = _free_port()
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        url = f"http://127.0.0.1:{port}"
        yield Server(url, environ_of(url))


@contextlib.contextmanager
def faulty_proxy(upstream: Server, *, rate: float, seed: int = 1) -> Iterator[Server]:
    port = _free_port()
    command = [sys.executable, "-m", "tests.faulty_proxy", str(port), upstream.url, str(rate), str(seed)]
    with _process(command, port):
        url = f"http://127.0.0.1:{port}"
        yield Server(url, environ_of(url))


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and its children talk to the server."""
    import s3fs

    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def make_bucket(name: str) -> None:
    """A bucket on the server in use."""
    client().create_bucket(Bucket=name)


def client(server: Server | None = None):  # type: ignore[no-untyped-def]
    """A botocore client of the server in use, or of another one."""
    import botocore.session

    return botocore.session.get_session().create_client("s3", endpoint_url=server.url if server else None)


def all_objects(server: Server, bucket: str) -> dict[str, bytes]:
    """Every object of a bucket."""
    c, found = client(server), {}
    for page in c.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for o in page.get("Contents", []):
            found[o["Key"]] = c.get_object(Bucket=bucket, Key=o["Key"])["Body"].read()
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, f"{' '.join(command[1:3])} did not start"
            time.sleep(0.1)
        yield
    finally:
        process.kill()  # there is nothing to keep
        process.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
