"""The documentation site in a real browser: it shows no error, and its search finds things."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".cache" / "site"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver on the path"
    ),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="make docs has not run"),
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None: ...


class Browser:
    """As much of the WebDriver protocol as this needs, spoken to chromedriver."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = address
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
            "--disable-background-networking --disable-component-update --window-size=1280,1000 "
            f"--user-data-dir={profile}"
        )
        options = {
            "goog:chromeOptions": {"binary": BROWSER, "args": flags.split()},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self("session", {"capabilities": {"alwaysMatch": options}})
        self.address += f"/session/{session['sessionId']}"

    def __call__(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(
            f"{self.address}/{path}".rstrip("/"), json.dumps(body).encode(), method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        """Run a script in the page and return what it returns."""
        return self("execute/sync", {"script": script, "args": []})

    def wait(self, script: str) -> Any:
        """Run a script until it returns something true, for up to two minutes."""
        return _until(lambda: self.run(script), script)


def _until(ask: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 120
    while not (found := ask()):
        assert time.monotonic() < end, f"nothing came of {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("browser")
    log = folder / "driver.log"
    with log.open("w") as file:
        driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=file, stderr=file)
    try:
        found = _until(lambda: re.search(r"on port (\d+)\.", log.read_text()), "chromedriver")
        browser = Browser(f"http://127.0.0.1:{found.group(1)}", folder / "profile")
        yield browser
        browser("", {}, "DELETE")
    finally:
        driver.terminate()
        driver.wait(120)


def test_pages_load_whole_and_from_here_alone(site: str, browser: Browser):
    for page in ("", "tutorial/", "api/", "troubleshooting/"):
        browser("url", {"url": f"{site}/{page}"})
        assert browser.run("return document.querySelector('h1').innerText.length > 2")
        broken = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        assert browser.run(broken) == []
        loaded = "return performance.getEntriesByType('resource').map(one => one.name)"
        assert [url for url in browser.run(loaded) if not url.startswith(site)] == []
        assert browser("se/log", {"type": "browser"}) == []


def test_search_finds_replay(site: str, browser: Browser):
    browser("url", {"url": f"{site}/"})
    browser.wait("return document.querySelector('.md-search__input') !== null")
    browser.run(
        "const box = document.querySelector('.md-search__input'); box.focus();"
        "box.value = 'replay'; box.dispatchEvent(new Event('input', {bubbles: true}));"
        "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true, key: 'y'}));"
    )
    found = browser.wait(
        "return [...document.querySelectorAll('.md-search-result__item a')].map(one => one.href)"
    )
    assert any("/api/" in link or "/tutorial/" in link for link in found)


def test_each_error_class_has_its_place(site: str, browser: Browser):
    browser("url", {"url": f"{site}/troubleshooting/#hostreaderror"})
    assert "item()" in browser.run(
        "return document.getElementById('hostreaderror').nextElementSibling.innerText"
    )
