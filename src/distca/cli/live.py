"""``distca report --live``: serves a page to browsers on this machine, and nobody else."""

import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from distca.report.pages.page import Page

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # by another name, a page of a stranger could ask us


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints bugs, but not that a browser has left before its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LiveServer:
    """Serves the page as ``/`` and its records as ``/page.json``.

    make: returns the page as it is now; raises ValueError or OSError if it cannot be made.
    state: returns a text that changes when the page does.
    """

    def __init__(self, make: Callable[[], Page], state: Callable[[], str], port: int = 0) -> None:
        self._make, self._state = make, state
        self._lock, self._known = Lock(), ("", "")
        try:
            self._server = _Server((ADDRESS, port), self._handler())
        except OSError as error:
            raise ValueError(
                f"--port {port} cannot be opened ({error.strerror}): choose another one, or none"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self._server.server_port}/"

    def serve_until_interrupted(self) -> None:
        try:
            self._server.serve_forever()
        except KeyboardInterrupt:
            pass  # this is how it ends
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """Ends ``serve_until_interrupted``, which runs in another thread."""
        self._server.shutdown()

    def _records(self) -> tuple[str, str]:
        """Returns the state and the records of the page, made again only if they have changed."""
        with self._lock:
            state = self._state()
            if state != self._known[0]:
                self._known = state, self._make().to_json()
            return self._known

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.headers.get("Host", "").rpartition(":")[0]
                if name not in HOSTS:
                    return self._answer(403, f"open {live.url} instead")
                if self.path not in ("/", "/page.json"):
                    return self._answer(404, f"open {live.url} instead")
                try:
                    if self.path == "/":
                        page = live._make().to_html(live=True)
                    else:
                        state, records = live._records()
                except (ValueError, OSError) as error:
                    return self._answer(503, " ".join(str(error).split()))
                if self.path == "/":
                    return self._answer(200, page, "text/html")
                tag = f'"{state}"'
                if self.headers.get("If-None-Match") == tag:
                    return self._answer(304, "", tag=tag)
                self._answer(200, records, "application/json", tag)

            def _answer(
                self, status: int, text: str, kind: str = "text/plain", tag: str = ""
            ) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-cache")
                if tag:
                    self.send_header("ETag", tag)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Prints nothing: the terminal shows where the page is, and no more."""

        return Handler
