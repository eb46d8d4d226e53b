"""The command line: ``videoflow``. Every error a user can meet is one line on stderr and an exit code; see
errors.py.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from videoflow.cli import data, health, run
from videoflow.errors import EXIT_INTERRUPTED, EXIT_SYSTEM, VideoflowError

app = typer.Typer(
    name="videoflow",
    help="Decode video once, cache it in Lance, train from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
run.register(app)
data.register(app)
health.register(app)


def main() -> None:
    """Entry point of the ``videoflow`` script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except VideoflowError as e:
        _fail(str(e), e.exit_code)
    except KeyboardInterrupt:
        _fail("stopped; run the same command again to go on where it stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_SYSTEM)
    except OSError as e:
        _fail(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", EXIT_SYSTEM)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> None:
    print(f"videoflow: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
