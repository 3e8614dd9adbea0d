"""A small S3 server for tests: puts and gets with conditions, ranges, listings and deletions, over IPv4 or IPv6.

It does what the protocol's published description says of ``If-None-Match``, ``If-Match``, ``Range`` and ListObjectsV2;
signatures are not checked.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


def loopback() -> str:
    """The IPv6 loopback address, or the IPv4 one on a host without IPv6."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return "127.0.0.1"


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.answers: dict[str, list[Any]] = {}
        super().__init__((host, 0), _Handler)

    def handle_error(self, *_: object) -> None:
        """A client that gave up while it was answered is what some tests are about."""


class S3Server:
    """One bucket in memory.

    Attributes:
        options: Options of ``ObjectStoreSink.from_url`` that lead here.
        objects: Path to bytes.
        requests: (method, path) of every request.
        answers: Method to what it does instead, in turn: an event to wait for, or a status to answer with; ``after``
            statuses are negative: the request takes effect, then the answer is that status.
    """

    def __init__(self) -> None:
        host = loopback()
        self._listener = _Listener(host)
        port = self._listener.server_address[1]
        self.objects, self.requests, self.answers = (
            self._listener.objects,
            self._listener.requests,
            self._listener.answers,
        )
        self.options = {
            "endpoint": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
            "region": "nowhere-1",
            "access_key_id": "nobody",
            "secret_access_key": "nothing",
        }
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


@functools.lru_cache(64)
def _tag(body: bytes) -> str:
    return '"' + hashlib.md5(body, usedforsecurity=False).hexdigest() + '"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _planned(self) -> int:
        """0 to go on as usual, else a status."""
        self.server.requests.append((self.command, unquote(urlsplit(self.path).path)))
        plan = self.server.answers.get(self.command, [])
        if not plan:
            return 0
        step = plan.pop(0)
        if isinstance(step, threading.Event):
            step.wait(20)
            return 0
        return int(step)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        planned = self._planned()
        if planned > 0:
            self._answer(planned)
            return
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            found = self.server.objects.get(path)
            match = self.headers.get("If-Match")
            failed = (self.headers.get("If-None-Match") == "*" and found is not None) or (
                match is not None and (found is None or match != _tag(found))
            )
            if not failed:
                self.server.objects[path] = body
        self._answer(-planned or (412 if failed else 200), headers={} if failed else {"ETag": _tag(body)})

    def do_GET(self) -> None:
        planned = self._planned()
        if planned:
            self._answer(abs(planned))
            return
        url = urlsplit(self.path)
        if "list-type=2" in url.query:
            self._list(unquote(url.path), parse_qs(url.query, keep_blank_values=True))
            return
        with self.server.lock:
            body = self.server.objects.get(unquote(url.path))
        if body is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = {"ETag": _tag(body), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, body, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last), len(body) - 1)
        if start >= len(body):
            self._answer(416, headers={"Content-Range": f"bytes */{len(body)}"})
            return
        self._answer(206, body[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{len(body)}"})

    do_HEAD = do_GET

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        """Seven keys a page, so that paging is seen."""
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        start = bucket.rstrip("/") + "/"
        with self.server.lock:
            names = sorted(p.removeprefix(start) for p in self.server.objects if p.startswith(start + prefix))
            sizes = {n: len(self.server.objects[start + n]) for n in names}
        names = [n for n in names if n > after]
        page, more = names[:7], len(names) > 7
        entries = "".join(
            f"<Contents><Key>{escape(n)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;x&quot;</ETag><Size>{sizes[n]}</Size></Contents>"
            for n in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            f'<?xml version="1.0"?><ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}'
            f"</ListBucketResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_DELETE(self) -> None:
        self._planned()
        with self.server.lock:
            self.server.objects.pop(unquote(urlsplit(self.path).path), None)
        self._answer(204)

    def do_POST(self) -> None:
        """DeleteObjects, which clients may use for one object too."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._planned()
        start = unquote(urlsplit(self.path).path).rstrip("/") + "/"
        with self.server.lock:
            keys = [piece.split("</Key>")[0] for piece in body.split("<Key>")[1:]]
            for key in keys:
                self.server.objects.pop(start + key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        text = f'<?xml version="1.0"?><DeleteResult>{deleted}</DeleteResult>'
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})
