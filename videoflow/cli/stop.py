"""What a signal that ends the command raises: a module of its own, since ``main`` may run under another name."""

from __future__ import annotations


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt, which the command line library would answer in its own words.

    A message replaces what the user is told about going on.
    """
