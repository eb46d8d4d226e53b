"""Which files of a folder are opened, by whomever: asked of the kernel (inotify), so that none is missed."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path
from types import TracebackType

IN_OPEN, IN_ISDIR, IN_Q_OVERFLOW = 0x20, 0x4000_0000, 0x4000
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 20


class Opens:
    """Counts opened files right below a folder while it is entered (Linux). Listing the folder or asking for a file's
    size is no opening.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []
        self._overflown = False

    def __enter__(self) -> Opens:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(self._folder), IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {self._folder}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_until_told, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        os.close(self._fd)
        if self._overflown and error is None:
            raise RuntimeError("more files were opened than could be counted")

    def _read_until_told(self) -> None:
        while not self._stop.wait(0.01):
            self._read()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                self._overflown |= bool(mask & IN_Q_OVERFLOW)
                if name and not mask & IN_ISDIR:
                    self.names.append(os.fsdecode(name))
