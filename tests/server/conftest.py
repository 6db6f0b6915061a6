"""The page for tests in a browser: one for each renderer, since to load it takes five seconds of a core."""

import contextlib
import itertools

import pytest
from browsing import CHROMIUM, Page

from devtools import prompts

RENDERERS = {"classic": False, "nodes 2.0": True}
_takes = itertools.count(1)


class Browser:
    """Chromium, and a page for each renderer; open from the first test that asks for a page until one comes that asks for none.

    Not for the session: while it lasts, Playwright's event loop runs on this thread, and no other can (`asyncio.run`).
    """

    def __init__(self):
        self._playwright = self._chromium = None
        self._pages = {}

    def page(self, renderer, server):
        if self._playwright is None:
            self._playwright = pytest.importorskip("playwright.sync_api").sync_playwright().start()
        if self._chromium is None:
            arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            self._chromium = self._playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        if renderer not in self._pages:
            found = self._pages[renderer] = Page(self._chromium, server)
            found.open(**{"VueNodes.Enabled": RENDERERS[renderer], "Locale": "en", "TutorialCompleted": True})
        return self._pages[renderer]

    def close(self):
        if self._playwright is None:
            return
        try:
            for page in self._pages.values():
                with contextlib.suppress(OSError):  # at the session's end the server is gone
                    page.server.post("/settings/Comfy.Locale", "en")
                page.context.close()
            if self._chromium is not None:
                self._chromium.close()
        finally:
            self._playwright.stop()
            self.__init__()


_browser = Browser()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or "opened" not in nextitem.fixturenames:
        _browser.close()


@pytest.fixture(scope="module")
def opened(request, server):
    """The page of a renderer, as the tests before have left it."""
    return _browser.page(request.param, server)


@pytest.fixture
def page(request, opened):
    """The page in English."""
    yield from _in(request, opened, "en")


@pytest.fixture
def japanese(request, opened):
    """The page in Japanese."""
    yield from _in(request, opened, "ja")


def _in(request, page, locale):
    if page.locale != locale:
        page.open(Locale=locale)
    page.tidy()
    failed = request.session.testsfailed
    yield page
    page.picture(request.node.name)
    errors = [error for error in page.errors if "torch-compile-kit" in error]
    if errors or request.session.testsfailed > failed:
        page.open()  # whatever state it is in
    assert not errors, page.errors


@pytest.fixture
def prompt(server):
    """The shipped workflow, small, with a setting of its own: the server runs nothing twice, and shares no code. One kind of
    block is compiled, since the server takes a second of a core to trace the other."""
    shipped = prompts.to_api(prompts.load(), server.get("/object_info"))
    small = prompts.shrink(shipped, width=128, height=128, steps=4)
    settings = {"backend": "eager", "only_blocks": "single_blocks.*", "cache_limit": 20 + next(_takes)}
    return prompts.change(small, prompts.MODEL_NODE, **settings)
