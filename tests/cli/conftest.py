"""The command line, called in this process."""

from __future__ import annotations

import json
import signal

import pytest

from videoflow.cli.main import main


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Run ``videoflow ARGS`` in this process."""

    def run(*args: object) -> Answer:
        monkeypatch.setattr("sys.argv", ["videoflow", *map(str, args)])
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])
        return Answer(code, *capsys.readouterr())

    return run
