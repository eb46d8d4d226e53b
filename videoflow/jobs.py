"""The HTTP client of Ray Jobs: hand a command to a running Ray cluster, ask how it is, read what it said, stop it.

Standard library only: who submits needs no Ray, and six small requests need no HTTP package. Redirects are not
followed, so that a token goes to nobody but the address that was given.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from videoflow.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_QUARANTINED,
    EXIT_SYSTEM,
    ClusterError,
    SystemFailure,
)
from videoflow.sources import printable

TIMEOUT_SECONDS = 30.0
SUBMIT_TRIES, RETRY_SECONDS = 5, 3.0
PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED = "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"
ENDED = frozenset({STOPPED, SUCCEEDED, FAILED})
#: Where Ray Jobs tells a command who it is: JSON with the submission's metadata.
CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Key of a submission's metadata: the id that the videoflow job is to have.
JOB_KEY = "videoflow_job"
TOKEN_FILE = "~/.ray/auth_token"


@dataclass(frozen=True)
class Submitted:
    """Who this process is to Ray Jobs: the submission's id, and the job id that `videoflow submit` gave it."""

    submission: str
    job: str | None


def submitted(environ: Mapping[str, str] = os.environ) -> Submitted | None:
    """Who this process is to Ray Jobs, None if it was not started by them."""
    try:
        metadata = json.loads(environ[CONFIG_VARIABLE])["metadata"]
        return Submitted(str(metadata["job_submission_id"]), metadata.get(JOB_KEY))
    except (KeyError, TypeError, ValueError):
        return None


def exit_code(info: Mapping[str, Any]) -> int:
    """What `videoflow run` ended with on the cluster, by what Ray Jobs tells of an ended submission."""
    if info["status"] == SUCCEEDED:
        return EXIT_OK
    if info["status"] == STOPPED:
        return EXIT_INTERRUPTED
    ours = (EXIT_INPUT, EXIT_QUARANTINED, EXIT_SYSTEM, EXIT_INTERRUPTED)
    code = info.get("driver_exit_code")
    return int(code) if code in ours else EXIT_SYSTEM


def why_failed(info: Mapping[str, Any]) -> str:
    """One line: why a submission failed before its command ran or otherwise than by an exit code of ours."""
    lines = [line.strip() for line in str(info.get("message") or "").splitlines() if line.strip()]
    kind = str(info.get("error_type") or info["status"]).lower().replace("_", " ")
    return f"{kind}: {lines[-1][:300]}" if lines else kind


def find_token(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The cluster's token and the name of the place it was found in, as Ray itself looks for it.

    Raises:
        ClusterError: a token file that was named cannot be read or is empty.
    """
    if environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or TOKEN_FILE).expanduser()
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        if named:
            raise ClusterError(f"RAY_AUTH_TOKEN_PATH names {path}, which cannot be read: {e}") from e
        return None
    if named and not token:
        raise ClusterError(f"RAY_AUTH_TOKEN_PATH names {path}, which is empty")
    return (token, str(path)) if token else None


def check_address(text: str) -> str:
    """The address of a dashboard in full: scheme, host, no slash at the end.

    Raises:
        ClusterError: another scheme, or credentials or a query inside.
    """
    address = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(
            f"--address {printable(address)}: give the cluster's dashboard, e.g. http://head:8265 "
            "(not a ray:// address, nor the port that nodes join by)"
        )
    if printable(address) != address:
        raise ClusterError(
            f"--address {printable(address)} holds credentials or a query, which would end up in logs: "
            "a cluster's token goes into RAY_AUTH_TOKEN"
        )
    return address


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class RayJobs:
    """Ray Jobs of one cluster.

    Raises (every method):
        ClusterError: no dashboard there, or it refuses the request. SystemFailure: it cannot be reached, or failed.
    """

    def __init__(self, address: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.address = check_address(address)
        self._timeout = timeout_seconds
        self._token = find_token()
        self._opener = urllib.request.build_opener(_NoRedirects())

    def version(self) -> str:
        """Ray's version: the way to know that a Ray dashboard answers here."""
        answer = self._ask("GET", "/api/version")
        version = self._json(answer).get("ray_version") if answer is not None else None
        if not version:
            raise self._no_dashboard()
        return str(version)

    def upload(self, digest: str, package: bytes) -> str:
        """Put a zip where every node of the cluster finds it; its URI, for a runtime environment."""
        name = f"_ray_pkg_{digest}.zip"
        path = f"/api/packages/gcs/{name}"
        if self._ask("GET", path) is None:
            self._ask("PUT", path, package, kind="application/octet-stream")
        return f"gcs://{name}"

    def submit(self, entrypoint: str, *, submission: str, working_dir: str, metadata: dict[str, str]) -> None:
        """Have the cluster run a shell command in a copy of the uploaded folder."""
        request = {
            "entrypoint": entrypoint,
            "submission_id": submission,
            "runtime_env": {"working_dir": working_dir},
            "metadata": metadata,
        }
        for tries_left in reversed(range(SUBMIT_TRIES)):
            try:
                answer = self._ask("POST", "/api/jobs/", json.dumps(request).encode())
            except SystemFailure:  # a cluster that has just started has no agent to take jobs for some seconds
                if self.info(submission) is not None:  # it arrived, and only the answer was lost
                    return
                if not tries_left:
                    raise
                time.sleep(RETRY_SECONDS)
                continue
            if answer is None:
                raise self._no_dashboard()
            return

    def info(self, submission: str) -> dict[str, Any] | None:
        """What the cluster knows of a submission (status, message, driver_exit_code, …), None if nothing."""
        answer = self._ask("GET", f"/api/jobs/{quote(submission)}")
        return None if answer is None else self._json(answer)

    def logs(self, submission: str) -> str:
        """All that a submission's command has said so far."""
        answer = self._ask("GET", f"/api/jobs/{quote(submission)}/logs")
        return "" if answer is None else str(self._json(answer).get("logs") or "")

    def stop(self, submission: str) -> bool:
        """Ask for a submission's end (SIGTERM, seconds later SIGKILL); False if the cluster does not know it."""
        return self._ask("POST", f"/api/jobs/{quote(submission)}/stop", b"") is not None

    # -- one request -------------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, kind: str = "application/json"
    ) -> bytes | None:
        """The answer's bytes; None for 404."""
        headers = {"Accept": "application/json", "User-Agent": "videoflow"}
        if body is not None:
            headers["Content-Type"] = kind
        if self._token:
            headers["Authorization"] = f"Bearer {self._token[0]}"
        request = urllib.request.Request(self.address + path, data=body, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as e:
            with e:
                if e.code == http.client.NOT_FOUND:
                    return None
                raise self._refusal(e) from None
        except http.client.RemoteDisconnected as e:
            raise SystemFailure(f"{self.address} hung up without an answer; is the cluster just starting?") from e
        except http.client.HTTPException as e:
            raise self._no_dashboard() from e
        except OSError as e:
            why = getattr(e, "reason", None) or e
            raise SystemFailure(
                f"cannot reach a Ray dashboard at {self.address}: {why}; is the cluster up, and its dashboard's port "
                "(8265 unless changed) open from here?"
            ) from e

    def _refusal(self, e: urllib.error.HTTPError) -> ClusterError | SystemFailure:
        if e.code == http.client.UNAUTHORIZED:
            return ClusterError(
                f"{self.address} asks for a token (401): set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it, "
                f"or put it into {TOKEN_FILE}"
            )
        if e.code == http.client.FORBIDDEN:
            told = f"the token in {self._token[1]} is not this cluster's" if self._token else "no token was sent"
            return ClusterError(f"{self.address} refuses access (403): {told}")
        if 300 <= e.code < 400:
            return ClusterError(
                f"{self.address} sends us to {printable(e.headers.get('Location') or 'another address')} ({e.code}): "
                "it is no Ray dashboard, or stands behind a login; give an address that answers by itself"
            )
        lines = [t.strip() for t in e.read(100_000).decode(errors="replace").splitlines() if t.strip()]
        said = f"{self.address} answers {e.code}: {lines[-1][:300] if lines else e.reason}"
        return SystemFailure(said) if e.code >= 500 else ClusterError(said)

    def _json(self, answer: bytes) -> dict[str, Any]:
        try:
            value = json.loads(answer)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._no_dashboard()
        return value

    def _no_dashboard(self) -> ClusterError:
        return ClusterError(
            f"{self.address} is no Ray dashboard: its answers are not those of Ray Jobs; the dashboard of a cluster "
            "listens on port 8265 of its head unless told otherwise"
        )
