"""Entry point of the command line. Every error a user can meet is one line on stderr and an exit code; see errors.py.

Signals are taken over before anything large is imported, so that Ctrl-C is quiet at any moment.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

from videoflow.cli.stop import Stopped
from videoflow.errors import EXIT_INTERRUPTED, EXIT_SYSTEM, VideoflowError, printable_text


def main() -> None:
    """Entry point of the ``videoflow`` script."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):  # names that a terminal cannot show are shown escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from videoflow.cli.app import app

        app()
    except VideoflowError as e:
        _fail(str(e), e.exit_code)
    except (Stopped, KeyboardInterrupt) as e:
        _fail(str(e) or "stopped; run the same command again to go on where it stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, e.g. head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_SYSTEM)
    except OSError as e:
        _fail(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", EXIT_SYSTEM)


def _stop(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):  # cleaning up is not interrupted; kill -9 is always safe
        signal.signal(again, signal.SIG_IGN)
    raise Stopped


def _fail(message: str, code: int) -> None:
    print(f"videoflow: {printable_text(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
