"""A page that is updated while its server runs."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

import pytest
from workbench import wait_for

from hetctl.cli.live_page import LivePage

PAGE = "<html><body><main>{}</main></body></html>"
PATIENCE_S = 30.0


@pytest.fixture
def live():
    page = LivePage(PAGE.format("first"))
    with page.served():
        yield page


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_the_newest_page_is_shown_with_its_script(live):
    assert "<main>first</main>" in get(live.url)
    live.show(PAGE.format("second"))
    found = get(live.url)
    assert "<main>second</main>" in found
    assert 'new EventSource("events")' in found


@pytest.mark.parametrize(
    "path", ["", "wrong/", "wrong/events", "{token}/../", "{token}/run.json", "{token}x/"]
)
def test_nothing_is_shown_without_the_token(live, path):
    start, _, rest = live.url.partition("127.0.0.1:")
    port, token, _ = rest.split("/")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{start}127.0.0.1:{port}/{path.format(token=token)}")


def test_it_is_served_to_this_machine_alone(live):
    assert live.url.startswith("http://127.0.0.1:")


def test_tokens_differ(live):
    other = LivePage("")
    with other.served():
        assert other.url.rpartition("/")[0].rpartition("/")[2] not in live.url


def test_browsers_are_told_of_changes_alone(live):
    told, opened = [], threading.Event()

    def listen():
        with urllib.request.urlopen(f"{live.url}events", timeout=PATIENCE_S) as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            opened.set()
            told.extend(line for line in stream if line.strip())

    browser = threading.Thread(target=listen)
    browser.start()
    assert opened.wait(PATIENCE_S)
    for text in ("first", "second", "second", "third"):
        live.show(PAGE.format(text))
    wait_for(lambda: b"data: 2\n" in told)
    live.end()
    browser.join(PATIENCE_S)
    versions = [int(line.removeprefix(b"data: ")) for line in told]
    # Changes before the stream looks again are told as one; the same page is none.
    assert versions == sorted({*versions})
    assert versions[-1] == 2


def test_a_port_serves_one_page(live):
    port = int(live.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="in use"), LivePage("").served(port):
        pass
