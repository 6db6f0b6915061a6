"""Pictures of README and docs/: no page that nobody should see is taken."""

import shutil

import pytest

from devtools import pictures

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page was not looked at")
NODE = "<script>window.app = {{ graph: {{ _nodes: [{{ title: 'KSampler', {} }}] }} }}</script>"


@pytest.fixture(scope="module")
def window():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page()
        browser.close()


def test_a_page_that_anybody_may_see_is_taken(window):
    window.set_content(f"<p>ready: 12% faster</p><input value='lighthouse'>{NODE.format('widgets: [{ value: 8 }]')}")
    assert pictures.take(window).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<p>Too noisy: repeat with more steps</p>", "no verdict"),
        ("<title>test_the_node_stands_between[classic]</title>", "the name of a test"),
        ("<textarea>/tmp/torch-compile-kit-demo/user</textarea>", "a temporary path"),
        ("<div class='toast'>RuntimeError: Traceback (most recent call last)</div>", "an error"),
        (NODE.format("widgets: [{ value: 'test_picture' }]"), "the name of a test"),
        (NODE.format("has_errors: true"), "an error"),
    ],
)
def test_a_page_that_nobody_should_see_is_refused(window, page, why):
    window.set_content(page)
    with pytest.raises(pictures.RefusedError, match=f"the page holds {why}"):
        pictures.take(window)
