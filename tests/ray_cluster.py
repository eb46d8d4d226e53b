"""A Ray cluster of one node for tests: `ray start --head` with a dashboard, a token, and an interpreter not on PATH."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = "a-token-that-only-this-cluster-knows-0123456789"
START_SECONDS, STARTS = 120, 3


@dataclass(frozen=True)
class Cluster:
    """``token_file``: holds what the head asks for."""

    address: str
    token_file: Path
    gcs: str  # what nodes and drivers join by
    num_cpus: int


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


@contextlib.contextmanager
def ray_cluster(num_cpus: int = 3) -> Iterator[Cluster]:
    """A head that runs until the block ends. PATH on it leads to interpreters that fail; Ray's own is another."""
    home = Path(tempfile.mkdtemp(prefix="vf-ray-"))  # short: Ray puts sockets below it
    for name in ("python", "python3"):
        (home / "bin").mkdir(exist_ok=True)
        (home / "bin" / name).write_text("#!/bin/sh\necho 'the interpreter on PATH' >&2\nexit 9\n")
        (home / "bin" / name).chmod(0o755)
    (home / "token").write_text(TOKEN)
    head = None
    try:
        for _ in range(STARTS):
            head, dashboard, gcs = _start(home, num_cpus)
            if _is_up(head, dashboard, home / "head.log"):
                break
            _end(head)
        else:
            raise AssertionError(f"ray start did not come up: {(home / 'head.log').read_text()[-2000:]}")
        yield Cluster(dashboard, home / "token", gcs, num_cpus)
    finally:
        if head is not None:
            if head.poll() is not None:
                print(f"the head ended by itself: {(home / 'head.log').read_text()[-2000:]}")
            _end(head)
        shutil.rmtree(home, ignore_errors=True)


def _start(home: Path, num_cpus: int) -> tuple[subprocess.Popen[bytes], str, str]:
    port, dashboard, agent, metrics, client = free_ports(5)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    # A busy machine is no reason for a node to give itself up.
    env |= {"RAY_agent_register_timeout_ms": "300000", "RAY_health_check_failure_threshold": "60"}
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--disable-usage-stats"]
    options = {
        "port": port,
        "dashboard-port": dashboard,
        "dashboard-host": "127.0.0.1",
        "dashboard-agent-listen-port": agent,
        "metrics-export-port": metrics,
        "ray-client-server-port": client,
        "num-cpus": num_cpus,
        "object-store-memory": 128 << 20,
        "temp-dir": home / "t",
    }
    command += [f"--{k}={v}" for k, v in options.items()]
    with (home / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    return head, f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}"


def _is_up(head: subprocess.Popen[bytes], address: str, log: Path) -> bool:
    """Wait for it. Ray's own patience with a busy machine, 30 s for the node, cannot be set: the head then ends."""
    request = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {TOKEN}"})
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and head.poll() is None:
        if b"Ray runtime started" in log.read_bytes():
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                return True
        time.sleep(0.3)
    return False


def _end(head: subprocess.Popen[bytes]) -> None:
    """The head and all that came of it, and nothing else."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ours = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(timeout=5)
        head.kill()
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    head.wait()
