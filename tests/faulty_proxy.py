"""``python -m tests.faulty_proxy PORT UPSTREAM RATE SEED``: an HTTP proxy in front of an S3 server that lets requests fail.

A failed request is answered with 500 or 503, or its connection is reset; each of them either before the request was
carried out or after it, so that what was written is not acknowledged. Which requests fail is drawn from SEED.
``GET /-/counts`` says how many failed, by kind; ``GET /-/mode/MODE`` sets what is wrong apart from that: ``ok``,
``denied`` (all requests are refused as of unknown credentials), ``unconditional`` (a store that overlooks
``If-None-Match``), ``unsupported`` (one that refuses it), ``down`` (all connections are reset).
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

KINDS = ("500", "503", "reset", "500-after", "503-after", "reset-after")
_XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>made up by a test</Message></Error>'
_CODES = {"500": "InternalError", "503": "SlowDown"}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-encoding", "date", "server"}


class Proxy:
    def __init__(self, upstream: str, rate: float, seed: int) -> None:
        self.upstream, self.rate, self.chance = upstream, rate, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.mode = "ok"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/-/"):
            if request.path.startswith("/-/mode/"):
                self.mode = request.path.rsplit("/", 1)[-1]
            return web.json_response(self.counts)
        body = await request.read()
        self.counts["requests"] += 1
        if self.mode == "denied":
            return web.Response(status=403, text=_XML.format("InvalidAccessKeyId"), content_type="application/xml")
        if self.mode == "unsupported" and "If-None-Match" in request.headers:
            return web.Response(status=501, text=_XML.format("NotImplemented"), content_type="application/xml")
        fault = self.chance.choice(KINDS) if self.chance.random() < self.rate else ""
        fault = "reset" if self.mode == "down" else fault
        self.counts[fault or "passed"] += 1
        if not fault.endswith("after") and fault:
            return self._fail(request, fault)
        response = await self._forward(request, body)
        return self._fail(request, fault.removesuffix("-after")) if fault else response

    def _fail(self, request: web.Request, fault: str) -> web.Response:
        if fault == "reset":
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return web.Response(status=int(fault), text=_XML.format(_CODES[fault]), content_type="application/xml")

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        drop = _HOP | {"host", "content-length"} | ({"if-none-match"} if self.mode == "unconditional" else set())
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in drop - {"content-encoding"}]
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self.session.request(
            request.method,
            url,
            data=body,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=["Accept-Encoding"],
        ) as answer:
            data = await answer.read()
            kept = [(k, v) for k, v in answer.headers.items() if k.lower() not in _HOP]
            if request.method != "HEAD":
                kept = [(k, v) for k, v in kept if k.lower() != "content-length"]
            return web.Response(status=answer.status, body=data if request.method != "HEAD" else None, headers=kept)

    async def serve(self, port: int) -> None:
        # A connection of its own for each request: a pooled one that the server has closed would be one more fault.
        connector = TCPConnector(force_close=True)
        async with ClientSession(timeout=ClientTimeout(60), connector=connector, auto_decompress=False) as self.session:
            runner = web.ServerRunner(web.Server(self.handle))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(Proxy(sys.argv[2], float(sys.argv[3]), int(sys.argv[4])).serve(int(sys.argv[1])))
