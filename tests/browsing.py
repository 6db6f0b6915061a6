"""ComfyUI's page in headless Chromium, for tests on a real server; its fixtures are in server/conftest.py."""

import os
import shutil
from pathlib import Path

import pytest

from devtools import prompts
from devtools.pictures import FEW_FRAMES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MARKS = [
    pytest.mark.server,
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page was not looked at"),
]
# A folder for pictures of each test's end; none by default. Those of README: devtools/pictures.py.
PICTURES = os.environ.get("TORCH_COMPILE_KIT_PICTURES")
KIT_NODES = ("Model", "Warmup", "Benchmark", "ControlNet", "VAEChannelsLast", "BlockSwap", "SaveCache", "LoadCache", "FixKeys")
# Where the renderer makes no difference to our scripts: the second one is for `dev.py test --rest`.
TWINS = pytest.mark.parametrize("opened", ["classic", pytest.param("nodes 2.0", marks=pytest.mark.rest)], indirect=True)
CLASSIC = pytest.mark.parametrize("opened", ["classic"], indirect=True)
BOTH = pytest.mark.parametrize("opened", ["classic", "nodes 2.0"], indirect=True)
NODES_2 = pytest.mark.parametrize("opened", ["nodes 2.0"], indirect=True)
HELPERS = """
    window.kit = {
      nodes: () => [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap((graph) => graph.nodes),
      node: (name) => kit.nodes().find((node) => node.comfyClass === "TorchCompileKit" + name || node.comfyClass === name),
      widget: (name, widget) => kit.node(name).widgets.find((found) => found.name === widget),
      text: (name) => kit.widget(name, "torch_compile_kit_report").element.textContent,
      progress: [],
      ended: 0,
      asked: 0,
      refused: () => Object.keys(app.lastNodeErrors ?? {}).length > 0,
      onProgress: () => {},
      frames: () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))),
    };
    const { api } = window.comfyAPI.api;
    api.addEventListener("promptQueueing", () => (kit.asked += 1)); // before it forgets the errors of an earlier prompt
    for (const end of ["success", "error", "interrupted"]) api.addEventListener("execution_" + end, () => (kit.ended += 1));
    api.addEventListener("torch-compile-kit.progress", () => kit.onProgress()); // when the node has shown it
    api.addEventListener("progress", ({ detail: { node, value, max } }) => kit.progress.push([node, value, max]));
"""
# Before anything is drawn: what the classic renderer writes on its canvas.
CLASSIC_DRAWS = """
    window.drawn = new Set();
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text) { drawn.add(text); return draw.apply(this, arguments); };
"""


class Page:
    """ComfyUI's page in a window of its own.

    Args:
        errors: what its scripts have thrown.
    """

    def __init__(self, browser, server):
        self.server, self.errors, self.settings = server, [], {}
        self.context = browser.new_context(viewport={"width": 1400, "height": 850}, reduced_motion="reduce")
        self.context.add_init_script(FEW_FRAMES)
        self.context.add_init_script(CLASSIC_DRAWS)
        self.window = self.context.new_page()
        self.window.on("pageerror", lambda error: self.errors.append(str(error)))
        self.window.set_default_timeout(180_000)

    def open(self, **settings):
        """(Re)load it, with these of ComfyUI's settings and those of before, until what was open before has come back."""
        self.settings |= settings
        for name, value in self.settings.items():
            self.server.post(f"/settings/Comfy.{name}", value)
        self.window.goto(self.server.url, wait_until="domcontentloaded")
        self.until("() => window.app?.graph && app.canvas && app.extensionManager")
        self.until("() => app.extensionManager.workflow.activeWorkflow && !app.extensionManager.spinner")
        self.window.evaluate(HELPERS)
        return self

    @property
    def locale(self):
        return self.settings.get("Locale")

    def tidy(self):
        """Close what an earlier test has left open."""
        self.window.keyboard.press("Escape")
        self.js(
            """() => {
                const { dialog, sidebarTab, toast } = app.extensionManager;
                toast.removeAll();
                if (sidebarTab.activeSidebarTabId) sidebarTab.toggleSidebarTab(sidebarTab.activeSidebarTabId);
                kit.progress = [];
            }"""
        )
        self.until("() => !document.querySelector('.p-toast-message, .p-dialog, .torch-compile-kit')")
        self.errors.clear()

    def js(self, expression, given=None):
        return self.window.evaluate(expression, given)

    def load(self, prompt):
        """Put a prompt in the place of what is open, and have it drawn."""
        self.js("(prompt) => app.loadApiJson(prompt, 'test')", prompt)
        self.until(f"() => app.graph._nodes.length === {len(prompt)}")
        self.js("() => kit.frames()")

    def press_run(self):
        """Press Run; a condition: one more prompt has ended, or this one was refused."""
        asked, ended = self.js("() => [kit.asked, kit.ended]")
        self.window.get_by_role("button", name="Run", exact=True).first.click()
        return f"() => kit.ended > {ended} || (kit.asked > {asked} && kit.refused())"

    def run(self):
        self.until(self.press_run())

    def until(self, condition):
        """Wait for a condition of the page."""
        try:
            self.window.wait_for_function(condition, polling=50)
        except Exception as error:
            raise AssertionError(f"the page did not get there: {condition}\n{error}") from None

    def until_shown(self, name, text):
        """Wait until a node's text matches."""
        self.until(f"() => /{text}/.test(kit.text('{name}'))")

    def picture(self, name):
        """Take one, if they are wanted."""
        if PICTURES:
            self.window.screenshot(path=Path(PICTURES) / f"{name.replace('/', ' ')}.png")

    def text(self, name):
        return self.js("(name) => kit.text(name)", name)

    def set(self, name, widget, value):
        self.js(
            "([name, widget, value]) => { const w = kit.widget(name, widget); w.value = value; w.callback?.(value); }",
            [name, widget, value],
        )


def only_model(prompt):
    """Without the warmup."""
    warmup = prompts.find(prompt, prompts.WARMUP_NODE)
    model = prompt[warmup]["inputs"]["model"]
    left = {node_id: node for node_id, node in prompt.items() if node_id != warmup}
    return prompts.change(left, "KSampler", model=model)


def set_and_reopen(page, mode, limit, **settings):
    """Set the node's mode and a cache limit that no other test has, open the page anew, and see that they are still there."""
    page.set("Model", "mode", mode)
    page.set("Model", "cache_limit", limit)
    page.js("() => app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()")
    page.until(f"() => Object.keys(localStorage).some((key) => localStorage.getItem(key).includes('{limit}'))")
    page.open(**settings)
    # The page may show another of its open workflows before it comes back to this one.
    kept = f"kit.widget('Model', 'mode').value === '{mode}' && kit.widget('Model', 'cache_limit').value === {limit}"
    page.until(f"() => kit.node('Model') && {kept}")
