"""The page for tests in a browser: one for each renderer in a module, since to load it takes five seconds."""

import itertools

import pytest
from browsing import CHROMIUM, Page

from devtools import prompts

RENDERERS = {"classic": False, "nodes 2.0": True}
_takes = itertools.count(1)


@pytest.fixture(scope="module")
def browser():
    """Not for the session: while it lasts, its event loop runs on this thread, and no other can (`asyncio.run`)."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def opened(request, browser, server):
    """One page for all tests of a module that look at the same renderer."""
    settings = {"VueNodes.Enabled": RENDERERS[request.param], "Locale": "en", "TutorialCompleted": True}
    found = Page(browser, server).open(**settings)
    yield found
    found.context.close()
    server.post("/settings/Comfy.Locale", "en")


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
    """The shipped workflow, small, with a setting of its own: the server runs nothing twice, and shares no code."""
    shipped = prompts.to_api(prompts.load(), server.get("/object_info"))
    small = prompts.shrink(shipped, width=128, height=128, steps=4)
    return prompts.change(small, prompts.MODEL_NODE, backend="eager", cache_limit=20 + next(_takes))
