"""An HTTP server that answers as a test tells it: for faults that no healthy cluster shows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """Answers every request as it was told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[str, str], Answer] = lambda method, path: (404, {}, b"")
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, dict(self.headers), body))
                code, headers, data = outer.answer(self.command, self.path)
                if code == 0:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(code)
                for k, v in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(k, v)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _any

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def always(self, code: int, data: bytes = b"", **headers: str) -> None:
        self.answer = lambda method, path: (code, headers, data)
