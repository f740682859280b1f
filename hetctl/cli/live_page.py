"""Page that a browser shows and updates while its server runs, on this machine alone."""

from __future__ import annotations

import errno
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hetctl.cli.output import show
from hetctl.model.errors import BadInputError

if TYPE_CHECKING:
    from hetctl.app.project import Project

LOOPBACK = "127.0.0.1"
UPDATE_EVERY_S = 5.0
"""Seconds between two looks at a run: drawing its page takes a second."""
SILENCE_S = 15.0
"""Seconds after which a comment is sent, which also notices browsers that have left."""
SCRIPT = """<script>
// The page is fetched again whenever the server has news; what was opened or chosen stays so.
new EventSource("events").onmessage = async () => {
  const page = new DOMParser().parseFromString(await (await fetch(location)).text(), "text/html");
  const opened = [...document.querySelectorAll("details")].map((each) => each.open);
  const chosen = [...document.querySelectorAll("input:checked")].map((each) => each.id);
  document.querySelector("main").replaceWith(page.querySelector("main"));
  document.querySelectorAll("details").forEach((each, place) => { each.open = opened[place] ?? each.open; });
  document.querySelectorAll("input").forEach((each) => { each.checked ||= chosen.includes(each.id); });
};
</script>
</body>"""


class LivePage:
    """Newest page, for any number of browsers; `url` has a random token, without which nothing is shown."""

    def __init__(self, page: str) -> None:
        self._news = threading.Condition()
        self._page, self._version, self._over = page, 0, False
        self._token = secrets.token_urlsafe(24)
        self.url = ""

    def show(self, page: str) -> None:
        """Replace the page; browsers are told unless it is the same."""
        with self._news:
            if page != self._page:
                self._page, self._version = page, self._version + 1
                self._news.notify_all()

    def end(self) -> None:
        """End the streams of browsers."""
        with self._news:
            self._over = True
            self._news.notify_all()

    @contextmanager
    def served(self, port: int = 0) -> Iterator[None]:
        """Serve it within a ``with`` block, from a port or, for 0, any free one; OSError if it is in use."""

        class Handler(_Handler):
            live = self

        with ThreadingHTTPServer((LOOPBACK, port), Handler) as server:
            self.url = f"http://{LOOPBACK}:{server.server_port}/{self._token}/"
            thread = threading.Thread(target=server.serve_forever, name="live-page", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self.end()
                server.shutdown()
                thread.join()

    def body(self) -> bytes:
        """Return the page with the script that updates it."""
        return self._page.replace("</body>", SCRIPT).encode()

    def versions(self) -> Iterator[int | None]:
        """Yield the version of the page, now and after changes, and None after `SILENCE_S` without one."""
        seen = self._version
        yield seen
        while not self._over:
            is_new = self._changed_since(seen)
            seen = self._version
            if not self._over:
                yield seen if is_new else None

    def _changed_since(self, version: int) -> bool:
        """Wait for another version, the end, or `SILENCE_S`; return false for the last."""
        with self._news:
            return self._news.wait_for(lambda: self._over or self._version != version, SILENCE_S)

    def place_of(self, path: str) -> str | None:
        """Return what a path names below the page; None without the token."""
        token, _, place = urlsplit(path).path.removeprefix("/").partition("/")
        return place if secrets.compare_digest(token.encode(), self._token.encode()) else None


class _Handler(BaseHTTPRequestHandler):
    live: LivePage

    def do_GET(self) -> None:
        """Answer with the page, or with a stream of its versions."""
        place = self.live.place_of(self.path)
        if place not in ("", "events"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Cache-Control", "no-store")
        # Links from the page would tell others the token.
        self.send_header("Referrer-Policy", "no-referrer")
        if place == "events":
            self._send_events()
            return
        body = self.live.body()
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_events(self) -> None:
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with suppress(ConnectionError):
            for version in self.live.versions():
                self.wfile.write(b": still here\n\n" if version is None else b"data: %d\n\n" % version)
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Log nothing: the paths hold the token."""


def serve_run(project: Project, run: str | None, port: int) -> None:
    """Serve the page of a run, by default the newest, until Ctrl-C; BadInputError if the port is in use."""
    from hetctl.app.run.status import RunWatch, search_in
    from hetctl.reports.run_page import render_page

    watch = RunWatch(project, run)
    status = watch.reported()
    page = LivePage(render_page(status, search_in(project, status)))
    try:
        with page.served(port):
            show(
                {"run": status.run, "url": page.url},
                [f"run {status.run}: {page.url}", "whoever has this address sees it; Ctrl-C ends it"],
            )
            sys.stdout.flush()
            while True:
                time.sleep(UPDATE_EVERY_S)
                before, status = status, watch.reported()
                if status != before:
                    page.show(render_page(status, search_in(project, status)))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise BadInputError(f"port {port} is in use", "name another with --port, or none") from None
    except KeyboardInterrupt:
        return
