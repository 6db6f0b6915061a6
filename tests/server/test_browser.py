"""The pack in ComfyUI's page, as a person has it: headless Chromium, in the classic renderer and in Nodes 2.0."""

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest

from devtools import help_pages, locales, prompts, texts
from devtools.pictures import FEW_FRAMES
from devtools.server import wait_until

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.server,
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page was not looked at"),
]
RENDERERS = {"classic": False, "nodes 2.0": True}
# A folder for pictures of each test's end; none by default. Those of README: devtools/pictures.py.
PICTURES = os.environ.get("TORCH_COMPILE_KIT_PICTURES")
KIT_NODES = ("Model", "Warmup", "Benchmark", "ControlNet", "VAEChannelsLast", "BlockSwap", "SaveCache", "LoadCache", "FixKeys")
_takes = itertools.count(1)
# Where the renderer makes no difference to our scripts: the second one is for `dev.py test --rest`.
TWINS = pytest.mark.parametrize("opened", ["classic", pytest.param("nodes 2.0", marks=pytest.mark.rest)], indirect=True)
CLASSIC = pytest.mark.parametrize("opened", ["classic"], indirect=True)
BOTH = pytest.mark.parametrize("opened", ["classic", "nodes 2.0"], indirect=True)
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
      frames: () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))),
    };
    const { api } = window.comfyAPI.api;
    api.addEventListener("promptQueueing", () => (kit.asked += 1)); // before it forgets the errors of an earlier prompt
    for (const end of ["success", "error", "interrupted"]) api.addEventListener("execution_" + end, () => (kit.ended += 1));
    api.addEventListener("progress", ({ detail: { node, value, max } }) => kit.progress.push([node, value, max]));
"""


# By state of a line, how much its colour differs from what is behind it.
CONTRASTS = """async () => {
    const context = document.createElement("canvas").getContext("2d");
    const luminance = (color) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = color;
        context.fillRect(0, 0, 1, 1);
        const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const isClear = (color) => color === "transparent" || color.endsWith(", 0)") || color.endsWith("/ 0)");
    const behind = (element) => {
        for (let at = element; at && at.id !== "graph-canvas-container" && at !== document.body; at = at.parentElement) {
            const color = getComputedStyle(at).backgroundColor;
            if (!isClear(color)) return color;
        }
        return LiteGraph.NODE_DEFAULT_BGCOLOR;
    };
    const { element } = kit.widget("Model", "torch_compile_kit_report"), found = {};
    for (const state of ["compiling", "ready", "faster", "unclear", "slower", "failed"]) {
        const line = { workflow: app.rootGraph.id, node: String(kit.node("Model").id), state, says: ["ready"], seconds: null };
        comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status", line);
        await kit.frames();
        const [one, other] = [getComputedStyle(element).color, behind(element)].map(luminance);
        found[state] = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    }
    return found;
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


class Page:
    """ComfyUI's page in a window of its own.

    Args:
        errors: what its scripts have thrown.
    """

    def __init__(self, browser, server):
        self.server, self.errors = server, []
        self.context = browser.new_context(viewport={"width": 1400, "height": 850}, reduced_motion="reduce")
        self.context.add_init_script(FEW_FRAMES)
        self.window = self.context.new_page()
        self.window.on("pageerror", lambda error: self.errors.append(str(error)))
        self.window.set_default_timeout(60_000)

    def open(self, **settings):
        """(Re)load it, with these of ComfyUI's settings, until what was open before has come back."""
        for name, value in settings.items():
            self.server.post(f"/settings/Comfy.{name}", value)
        self.window.goto(self.server.url, wait_until="domcontentloaded")
        self.until("() => window.app?.graph && app.canvas && app.extensionManager")
        self.until("() => app.extensionManager.workflow.activeWorkflow && !app.extensionManager.spinner")
        self.window.evaluate(HELPERS)
        return self

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


@pytest.fixture(scope="module")
def opened(request, browser, server):
    """One page for all tests that look at the same renderer."""
    settings = {"VueNodes.Enabled": RENDERERS[request.param], "Locale": "en", "TutorialCompleted": True}
    found = Page(browser, server).open(**settings)
    yield found
    found.context.close()
    server.post("/settings/Comfy.Locale", "en")


@pytest.fixture
def page(request, opened):
    opened.tidy()
    failed = request.session.testsfailed
    yield opened
    opened.picture(request.node.name)
    errors = [error for error in opened.errors if "torch-compile-kit" in error]
    if errors or request.session.testsfailed > failed:
        opened.open(Locale="en")  # whatever state it is in
    assert not errors, opened.errors


@pytest.fixture
def prompt(server):
    """The shipped workflow, small, with a setting of its own: the server runs nothing twice, and shares no code."""
    shipped = prompts.to_api(prompts.load(), server.get("/object_info"))
    small = prompts.shrink(shipped, width=128, height=128, steps=4)
    return prompts.change(small, prompts.MODEL_NODE, backend="eager", cache_limit=20 + next(_takes))


def only_model(prompt):
    """Without the warmup."""
    warmup = prompts.find(prompt, prompts.WARMUP_NODE)
    model = prompt[warmup]["inputs"]["model"]
    left = {node_id: node for node_id, node in prompt.items() if node_id != warmup}
    return prompts.change(left, "KSampler", model=model)


def search(page, name="Add a node..."):
    """The box for a node to add, by a double click on an empty graph."""
    box = page.window.get_by_role("combobox", name=name)
    page.js("() => app.graph.clear()")
    for _try in range(20):  # on a busy machine the page takes it for two clicks
        page.window.mouse.dblclick(500, 700)
        with contextlib.suppress(playwright.TimeoutError):
            box.wait_for(timeout=1000)
            return box
    raise AssertionError("a double click on the empty graph opens no search")


OURS = r"^\s*Torch Compile(?! *(Warmup|Benchmark|ControlNet|Block))"
# How the page ranks (src/utils/fuseUtil.ts and postProcessSearchScores in src/stores/nodeDefStore.ts): by the class of the
# match of id or display name (0 equal, 1 starts with, 2 a word, 3 contains, 4 and 5 all words apart, 9 what only an alias or a
# like spelling has found), then by a frequency, a number that ComfyUI's page brings for the nodes that there were when it was
# made (sorted-custom-node-map.json: TorchCompileModel 3, Seed 10.6, ours none), then by length. So elsewhere it is decided that
# we are second for
# - "torch": class 1 for both; class 0 would need the name "torch".
# - "compile": class 2 for both; "Compile ..." would be first, and 4th for "torch", behind its siblings.
# - "speed": class 9 for both, as aliases have no class of their own; with the word in the name, "torch compile" is no longer
#   equal to it, and Torch Compile Warmup, which is shorter, comes before it.
FOUND = {
    "torch compile": [OURS],
    "faster": [OURS],
    "acceleration": [OURS],
    "optimize": [OURS],
    "torch": [r"^\s*TorchCompileModel", OURS],
    "compile": [r"^\s*TorchCompileModel", OURS],
    "speed": [r"^\s*Seed", OURS],
}


@CLASSIC
@pytest.mark.parametrize("box", ["Add a node...", pytest.param("Search Nodes...", marks=pytest.mark.rest)])
def test_the_node_is_the_first_that_a_search_finds(page, box):
    """Or the second, where that is all a node of a pack can be; in the box for nodes and in the older one."""
    old = box.startswith("Search")
    try:
        if old:
            page.js("() => app.extensionManager.setting.set('Comfy.NodeSearchBoxImpl', 'v1 (legacy)')")
        box, options = search(page, box), page.window.locator("[role=option]:not(.p-autocomplete-input-chip)")
        for words, expected in FOUND.items():
            box.fill("KSampler")  # what is found by the words before is gone
            playwright.expect(options.first).to_have_text(re.compile(r"^\s*KSampler"))
            box.fill(words)
            for place, name in enumerate(expected):
                playwright.expect(options.nth(place), words).to_have_text(re.compile(name))
    finally:
        if old:
            page.js("() => app.extensionManager.setting.set('Comfy.NodeSearchBoxImpl', 'default')")


@TWINS
def test_the_node_alone_tells_how_it_goes_and_keeps_its_values(page, prompt):
    page.load(only_model(prompt))
    page.js(
        "() => app.loadGraphData(app.graph.serialize())"
    )  # a prompt has no id, by which its lines are known when it comes back
    page.until("() => app.rootGraph.id !== '00000000-0000-0000-0000-000000000000'")
    assert page.text("Model") == "Press Run to see the status."
    page.run()
    page.until_shown("Model", "^ready")
    if not page.js("() => !!LiteGraph.vueNodesMode"):  # Nodes 2.0 hides them by itself
        shown = page.js("() => kit.node('Model').widgets.filter((widget) => !widget.hidden).map((widget) => widget.name)")
        assert shown == ["mode", "compile_when", "torch_compile_kit_report"]
    set_and_reopen(page, "max-autotune", 3971)
    page.until_shown("Model", "^ready")


@BOTH
def test_a_new_node_shows_its_line_in_whole_and_its_inputs_in_order(page):
    """One short line, whatever the node's width; workflows store values by the place of their inputs."""
    page.load({str(at): {"class_type": f"TorchCompileKit{name}", "inputs": {}} for at, name in enumerate(KIT_NODES, 1)})
    page.js(
        """async () => {
            app.graph._nodes.forEach((node, at) => { node.pos = [350 * (at % 5), at < 5 ? 0 : 500]; });
            Object.assign(app.canvas.ds, { scale: 0.7, offset: [80, 100] });
            app.canvas.setDirty(true, true);
            await kit.frames();
            await kit.frames();
        }"""
    )
    cut = page.js("""() => app.graph._nodes.map((node) => {
        const { element } = kit.widget(node.comfyClass, "torch_compile_kit_report");
        const whole = element.scrollHeight <= element.clientHeight && element.scrollWidth <= element.clientWidth;
        return [node.comfyClass, element.isConnected && whole && element.textContent];
    })""")
    assert dict(cut) == {f"TorchCompileKit{name}": "Press Run to see the status." for name in KIT_NODES}
    assert page.js("() => kit.node('Model').widgets.map(({ name }) => name)") == [
        *("mode", "compile_when", "backend", "dynamic", "fullgraph", "cache_limit", "block_swap", "attention", "on_failure"),
        *("allow_tf32", "cudnn_benchmark", "only_blocks", "torch_compile_kit_report"),
    ]


@CLASSIC
def test_a_bypassed_node_loses_its_line(page, prompt):
    page.load(only_model(prompt))
    page.run()
    page.until_shown("Model", "^ready")
    page.js("() => { kit.node('Model').mode = 4; }")
    page.until_shown("Model", "^Press Run to see the status")
    page.set("KSampler", "seed", 9)
    page.run()
    assert page.text("Model") == "Press Run to see the status."


def set_and_reopen(page, mode, limit, **settings):
    """Set the node's mode and a cache limit that no other test has, open the page anew, and see that they are still there."""
    page.set("Model", "mode", mode)
    page.set("Model", "cache_limit", limit)
    page.js("() => app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()")
    page.until(f"() => Object.keys(localStorage).some((key) => localStorage.getItem(key).includes('{limit}'))")
    page.open(**settings)
    page.until("() => kit.node('Model')")
    assert page.js("() => [kit.widget('Model', 'mode').value, kit.widget('Model', 'cache_limit').value]") == [mode, limit]


@CLASSIC
def test_the_vae_node_says_what_it_does_and_a_repaired_file_what_was_renamed(page, prompt, server):
    import safetensors.torch
    import torch

    folder = server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file({"_orig_mod.a.weight": torch.ones(3)}, folder / "compiled.safetensors")
    prompt = prompts.without_kit(prompt)
    prompt["71"] = {"class_type": "TorchCompileKitVAEChannelsLast", "inputs": {"vae": [prompts.find(prompt, "VAELoader"), 0]}}
    prompt["72"] = {"class_type": "TorchCompileKitFixKeys", "inputs": {"file": "loras/compiled.safetensors"}}
    page.load(prompts.change(prompt, "VAEDecode", vae=["71", 0]))
    assert page.text("VAEChannelsLast") == page.text("FixKeys") == "Press Run to see the status."
    page.run()
    page.until_shown("VAEChannelsLast", "GPU")
    page.until_shown("FixKeys", "1 of 1")
    assert (folder / "compiled_repaired.safetensors").is_file()


@BOTH
def test_a_preset_of_the_nodes_menu_sets_its_inputs(page, prompt):
    page.load(only_model(prompt))
    page.set("Model", "cache_limit", 5)
    at = page.js(
        """() => {
            const { ds, canvas } = app.canvas, { pos } = kit.node("Model"), { left, top } = canvas.getBoundingClientRect();
            return [left + (pos[0] + 60 + ds.offset[0]) * ds.scale, top + (pos[1] - 15 + ds.offset[1]) * ds.scale];
        }"""
    )
    page.window.mouse.click(*at, button="right")
    presets, chosen = page.window.get_by_text("Presets").last, page.window.get_by_text("Fastest steps").last
    if page.js("() => !!LiteGraph.vueNodesMode"):
        presets.hover()
    else:  # the classic menu opens on a click
        presets.click()
    chosen.click()
    page.until("() => kit.widget('Model', 'mode').value === 'max-autotune'")
    found = page.js("() => ['backend', 'mode', 'dynamic', 'cache_limit'].map((name) => kit.widget('Model', name).value)")
    assert found == ["inductor", "max-autotune", "auto", 0]


@pytest.mark.parametrize("opened", ["nodes 2.0"], indirect=True)
def test_hidden_inputs_leave_no_room_in_a_node_that_is_new_or_loaded(page, prompt):
    page.load(only_model(prompt))
    for _ in ("new", "loaded, from the height that the classic renderer gave it"):
        page.js("() => kit.frames()")
        height = page.js("() => document.querySelector(`[data-node-id='${kit.node('Model').id}']`).offsetHeight")
        assert 100 < height < 230, height
        page.js(
            """async () => {
                const graph = app.graph.serialize();
                graph.nodes.find((node) => node.type === "TorchCompileKitModel").size = [240, 150];
                await app.loadGraphData(graph);
            }"""
        )


@TWINS
def test_the_warmup_counts_up_and_reports(page, prompt):
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes="192x128"))
    page.run()
    report = page.text("Warmup")
    assert report.startswith("Ready for 128x128"), report
    node = page.js("() => String(kit.node('Warmup').id)")
    seen = [value / most for found, value, most in page.js("() => kit.progress") if str(found) == node]
    assert seen and seen == sorted(seen) and seen[-1] == 1, seen
    assert "<details>" in page.js("() => kit.widget('Warmup', 'torch_compile_kit_report').element.innerHTML")


HEIGHT = """() => (LiteGraph.vueNodesMode ? document.querySelector(`[data-node-id='${kit.node("Warmup").id}']`).offsetHeight
    : kit.node("Warmup").size[1])"""


@BOTH
def test_a_node_grows_no_taller_while_a_warmup_runs(page, prompt):
    """ComfyUI's own text of the progress is a widget more: 60 pixels and more. In Nodes 2.0 a second line of ours takes 14."""
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes="192x128"))
    page.set("Model", "cache_limit", 43 if page.js("() => LiteGraph.vueNodesMode") else 42)  # code of its own
    page.js("() => { app.canvas.centerOnNode(kit.node('Warmup')); return kit.frames(); }")  # what is out of sight is not drawn
    before = page.js(HEIGHT)
    page.js(f"() => {{ kit.seen = []; kit.timer = setInterval(() => kit.seen.push([({HEIGHT})(), kit.text('Warmup')]), 50); }}")
    page.run()
    page.js("() => clearInterval(kit.timer)")
    while_running = [(height, text) for height, text in page.js("() => kit.seen") if re.search(r"\(\d of 2\): ", text)]
    assert any("compiling" in text for _, text in while_running), page.js("() => kit.seen.map(([, text]) => text)")
    assert max(height for height, _ in while_running) <= before + 15, (before, while_running)


@BOTH
def test_a_report_scrolls_and_does_not_grow_over_the_nodes_below(page, prompt):
    sizes = "\n".join(f"{128 + 16 * i}x128" for i in range(1, 9))
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes=sizes))
    page.js("() => { app.canvas.centerOnNode(kit.node('Warmup')); return kit.frames(); }")  # what is out of sight is not drawn
    before = page.js(HEIGHT)
    page.run()
    page.js(
        """async () => {
            const { element } = kit.widget("Warmup", "torch_compile_kit_report");
            element.querySelector("details").open = true;
            await kit.frames();
            await kit.frames();
        }"""
    )
    shown, whole = page.js(
        """() => {
            const { element } = kit.widget("Warmup", "torch_compile_kit_report");
            return [element.clientHeight, element.scrollHeight];
        }"""
    )
    # In Nodes 2.0 our text has less room before.
    assert page.js(HEIGHT) <= before + 200 and 60 < shown < whole, (before, page.js(HEIGHT), shown, whole)


@TWINS
def test_a_cancelled_warmup_leaves_no_old_report(page, prompt):
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes=""))
    page.run()
    assert page.text("Warmup").startswith("Ready")
    page.set("Warmup", "extra_sizes", "\n".join(f"{128 + 16 * i}x128" for i in range(1, 16)))
    page.set("Model", "backend", "aot_eager")
    over = page.press_run()
    page.until_shown("Warmup", "\\(1 of 16\\): ")
    page.js("() => fetch('/interrupt', { method: 'POST' })")
    page.until(over)
    page.until_shown("Warmup", "^Cancelled")


@TWINS
def test_a_bad_value_is_refused_on_its_node(page, prompt):
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, extra_sizes="as big as possible"))
    page.run()
    errors = page.js("() => Object.values(app.lastNodeErrors ?? {}).map((found) => JSON.stringify(found))")
    assert len(errors) == 1 and "extra_sizes" in errors[0] and "as big as possible" in errors[0], errors
    page.until("() => kit.node('Warmup').has_errors")  # it has a red frame
    page.until_shown("Warmup", "^extra_sizes = 'as big as possible': line 1 is no size")
    page.set("Warmup", "extra_sizes", "")
    page.run()
    page.until_shown("Warmup", "^Ready")


@TWINS
def test_what_ended_a_prompt_stands_in_the_node_until_the_next_one(page, prompt):
    page.load(only_model(prompts.change(prompt, prompts.MODEL_NODE, only_blocks="transformer_blocks.*")))
    page.run()
    page.until_shown("Model", "transformer_blocks")
    assert "throw an error" not in page.text("Model")
    page.set("Model", "only_blocks", "")
    page.run()
    page.until_shown("Model", "^(ready|compiling)")


@BOTH
@pytest.mark.parametrize("palette", ["dark", "light"])
def test_a_line_can_be_read_in_both_themes(page, palette):
    """Contrast of 4.5:1 at least between its colours and the node (WCAG 2.2, 1.4.3)."""
    page.js("(palette) => app.extensionManager.setting.set('Comfy.ColorPalette', palette)", palette)
    try:
        page.until(f"() => !!document.querySelector('html.dark-theme, body.dark-theme') === {str(palette == 'dark').lower()}")
        page.load({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}})
        page.js("() => kit.frames()")
        contrasts = page.js(CONTRASTS)
        page.picture(f"theme {palette} {'vue' if page.js('() => !!LiteGraph.vueNodesMode') else 'classic'}")
    finally:
        page.js("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")
    assert len(contrasts) == 6 and min(contrasts.values()) >= 4.5, contrasts


@TWINS
def test_compiling_begins_now_with_a_button_on_the_node(page):
    """As for a prompt of few steps on a GPU; this server has none."""
    page.load({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}})
    page.js(
        """() => comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status", {
            workflow: app.rootGraph.id, node: String(kit.node("Model").id),
            state: "unclear", says: ["putOff", 12], seconds: null, begins: "5eed",
        })"""
    )
    page.js("() => (app.canvas.centerOnNode(kit.node('Model')), kit.frames())")
    asked = []

    def answer(route):
        asked.append(route.request.post_data_json)
        answered = route.fetch()
        route.fulfill(response=answered, json={"begins": answered.json() == {"begins": False}})

    page.window.route("**/torch-compile-kit/begin", answer)
    try:
        page.window.get_by_role("button", name="Compile now").click()
        page.until_shown("Model", "^compiling begins with the next step$")
    finally:
        page.window.unroute("**/torch-compile-kit/begin")
    assert asked == [{"model": "5eed"}] and not page.window.get_by_role("button", name="Compile now").count()


def load_without_latent(page, prompt):
    """A workflow that compiles for each size, and whose warmup knows one, whatever the sampler gets."""
    prompt = prompts.change(prompt, prompts.MODEL_NODE, compile_when="before first image", dynamic="false")
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes=""))
    page.js("() => kit.node('Warmup').disconnectInput(kit.node('Warmup').findInputSlot('latent_image'))")


@TWINS
def test_that_an_image_waited_for_compiling_is_told_as_information(page, prompt):
    load_without_latent(page, prompt)
    page.set("EmptySD3LatentImage", "width", 192)
    page.run()
    page.window.get_by_text("Torch Compile Kit: Flux").first.wait_for()
    page.window.get_by_text(re.compile(r"Waited [\d.]+ s for compiling: width changed from 128 to 192")).first.wait_for()
    assert page.window.locator(".p-toast-message-info").count() and not page.window.locator(".p-toast-message-warn").count()
    notice, run = (page.window.locator(where).first.bounding_box() for where in (".p-toast-message", "button:has-text('Run')"))
    below = notice["y"] >= run["y"] + run["height"]
    assert below or notice["x"] >= run["x"] + run["width"], "Run stays in reach"


@TWINS
def test_a_size_that_the_warmup_lacks_is_added_with_a_button(page, prompt):
    load_without_latent(page, prompt)
    page.run()
    page.set("EmptySD3LatentImage", "width", 192)
    page.run()
    page.js("() => app.canvas.centerOnNode(kit.node('Warmup'))")  # what is out of sight is not drawn
    page.window.get_by_role("button", name="Add 192x128 to extra_sizes").click()
    assert page.js("() => kit.widget('Warmup', 'extra_sizes').value") == "192x128"
    assert page.js("() => kit.node('Warmup').inputs.find((input) => input.name === 'latent_image').link") is None
    page.run()
    assert page.text("Warmup").startswith("Ready for 128x128"), page.text("Warmup")
    for solved in ("Add 192x128", "Torch Compile Kit: Flux"):
        page.window.get_by_text(solved).first.wait_for(state="detached")


@CLASSIC
@pytest.mark.rest
def test_the_node_stands_between_the_loader_and_the_sampler(page, prompt):
    """As README shows it: three nodes in a row, and a line that is not cut."""
    page.load(only_model(prompt))
    page.run()
    page.until_shown("Model", "^ready")
    page.js(
        """() => {
            for (const node of app.graph._nodes) node.pos = [-3000, node.pos[1]];
            ["UNETLoader", "Model", "KSampler"].forEach((name, place) => (kit.node(name).pos = [300 * place, 0]));
            Object.assign(app.canvas.ds, { scale: 1.05, offset: [90, 120] });
            app.canvas.setDirty(true, true);
        }"""
    )
    page.js("() => kit.frames()")
    fits = page.js("""() => {
        const { element } = kit.widget("Model", "torch_compile_kit_report");
        return [element.scrollWidth <= element.clientWidth, element.scrollHeight <= element.clientHeight];
    }""")
    assert fits == [True, True], page.text("Model")


def open_panel(page):
    page.window.get_by_role("button", name="Torch Compile Kit:").first.click()
    panel = page.window.locator(".torch-compile-kit")
    panel.wait_for()
    return panel


@TWINS
def test_the_panel_tells_what_is_compiled_and_clears_the_cache(page, prompt):
    page.load(only_model(prompt))
    page.run()
    page.until_shown("Model", "^ready")
    page.set("KSampler", "seed", 8)
    page.run()
    left = Path(page.server.get("/torch-compile-kit/cache")["folder"], f"{'ab' * 32}.code")
    left.write_bytes(bytes(32) + b'{"class": "Block"}\n' + bytes(3 * 2**20))
    panel = open_panel(page)
    panel.get_by_text("128x128").first.wait_for()
    panel.get_by_text("MiB of 2 GiB").wait_for()
    assert "Flux ready" in panel.inner_text(), panel.inner_text()
    assert re.match(
        r"Torch Compile\s+Blocks are the repeated parts.*?\s+Check this machine\s+Models in memory", panel.inner_text()
    )
    panel.get_by_role("button", name="Check this machine").click()
    panel.get_by_text(re.compile(r"PyTorch [0-9.]+ \(tested\),.*PyTorch sees no GPU", re.S)).wait_for()
    panel.get_by_role("button", name="Clear").click()
    page.window.get_by_role("button", name="Confirm").click()
    panel.get_by_text("Removed:").wait_for()
    assert not left.exists()


@pytest.mark.rest
@CLASSIC
def test_sampling_waits_for_code_when_the_panel_is_told_so(page, prompt):
    """With inductor, which takes a while."""
    page.load(prompts.change(only_model(prompt), prompts.MODEL_NODE, backend="inductor"))
    page.set("EmptySD3LatentImage", "width", 64)
    page.set("EmptySD3LatentImage", "height", 64)
    page.set("KSampler", "steps", 400)  # the button is pressed meanwhile, on a busy machine too
    panel = open_panel(page)
    over = page.press_run()
    panel.get_by_role("button", name="Wait until ready").click()
    page.until(over)
    model = next(m for m in page.server.get("/torch-compile-kit/report")["models"] if "64x64" in m["sizes"])
    assert not model["being_compiled"] and model["graphs"] >= 2, model
    assert model["seconds_gained"] is None or abs(model["seconds_gained"]) < model["compile_seconds"], "waiting is no step"


@TWINS
def test_the_benchmark_begins_with_one_sentence(page, prompt):
    page.load(prompts.with_benchmark(prompt, steps=4))
    page.run()
    text = page.text("Benchmark")
    assert re.match(r"[\d.]+x as fast|Slower: [\d.]+x the time|No clear difference|Too noisy: repeat", text), text
    assert "a step, median" in text and "uncompiled █" in text
    assert page.js("() => kit.node('Benchmark').size[0]") >= 520
    page.js("() => { app.canvas.centerOnNode(kit.node('Benchmark')); return kit.frames(); }")  # for its picture


@CLASSIC
def test_the_panel_shows_what_limited_the_last_benchmark(page, prompt):
    page.load(prompts.with_benchmark(prompt))
    page.run()
    panel = open_panel(page)
    panel.get_by_text("Last benchmark").first.wait_for()
    limit = panel.locator(".model b").last.inner_text()
    assert re.match(r"[\d.]+ m?s \(\d+%\): \w+", limit) and limit in page.text("Benchmark"), limit
    panel.locator(".model b").last.scroll_into_view_if_needed()


@CLASSIC
def test_the_settings_of_the_pack(page, prompt):
    def cache_limit_becomes(gib):
        page.js("(gib) => app.extensionManager.setting.set('TorchCompileKit.CacheGiB', gib)", gib)
        wait_until(lambda: page.server.get("/torch-compile-kit/cache")["limit"] == gib * 2**30, f"a limit of {gib} GiB", 30)

    page.window.get_by_role("button", name="Settings").first.click()
    page.window.get_by_text("Torch Compile Kit", exact=True).first.click()
    page.window.get_by_text("Size limit of the cache on disk, in GiB").wait_for()
    chosen = page.window.get_by_role("dialog").get_by_text("in background", exact=True)
    assert chosen.evaluate("(text) => text.scrollWidth <= text.clientWidth"), "it is cut"
    try:
        cache_limit_becomes(3)
        page.js("() => app.extensionManager.setting.set('TorchCompileKit.CompileWhen', 'before first image')")
        made = page.js(
            "() => LiteGraph.createNode('TorchCompileKitModel').widgets.find((w) => w.name === 'compile_when').value"
        )
        assert made == "before first image"
        page.load(only_model(prompt))
        assert page.js("() => kit.widget('Model', 'compile_when').value") == "in background", "a workflow keeps its own"
    finally:
        cache_limit_becomes(2)
        page.js("() => app.extensionManager.setting.set('TorchCompileKit.CompileWhen', 'in background')")


@CLASSIC
def test_templates_open_and_lack_only_models(page):
    """They are offered for download."""
    ((module, names),) = [found for found in page.server.get("/workflow_templates").items() if prompts.SHIPPED.stem in found[1]]
    assert set(names) == {file.stem for file in prompts.TEMPLATES}
    for name in names:
        page.js(
            """async ([module, name]) => {
                const answer = await fetch(`/api/workflow_templates/${module}/${encodeURIComponent(name)}.json`);
                await app.loadGraphData(await answer.json(), true, true, name);
            }""",
            [module, name],
        )
        page.until("() => app.graph._nodes.some((node) => node.has_errors)")  # it has looked for what is missing
        page.picture(f"template {name}")
        nodes = page.js("() => app.graph._nodes.map((node) => [node.type, !!node.has_errors, !!node.properties.models])")
        assert "TorchCompileKitModel" in [kind for kind, _, _ in nodes]
        assert not [kind for kind, lacks, offered in nodes if lacks and not offered]
        assert page.window.get_by_text("missing node", exact=False).count() == 0


@CLASSIC
def test_the_help_of_each_node_fits_its_panel(page):
    """As ComfyUI's own panel shows it, which is 282 pixels wide: no table, and what is folded can be opened."""
    page.js("() => { app.graph.clear(); app.graph.add(LiteGraph.createNode('TorchCompileKitModel')); }")
    page.js("() => app.canvas.selectNode(app.graph._nodes[0])")
    page.window.get_by_test_id("info-button").or_(page.window.get_by_role("button", name="Node Info")).first.click()
    more = page.window.get_by_text("More", exact=True).first
    more.click()
    assert more.evaluate("(found) => found.closest('details').open")
    shown = more.evaluate_handle("(found) => found.closest('.node-help-content, .overflow-y-auto')")
    assert shown.evaluate("(box) => box.scrollWidth - box.clientWidth") <= 0


# What stays as it is in Japanese: products, technical names, units, models. A token with "_", "." or "/" is a name in code.
KEPT = """
    Torch Compile Kit torch compile torch-compile-kit ComfyUI TorchCompileModel PyTorch Triton CUDA cuDNN TF fp NVIDIA RTX AMD
    Apple Linux Windows macOS OS PC Python Visual Studio Build Tools Redis redis GPU CPU VRAM RAM GB GiB MB MiB ms zip
    VAE CLIP LoRA ControlNet Control UNet Transformer GGUF SD SDXL Flux cfg channels last Channels Last NAME sage xformers
    cudaMallocAsync InvalidCxxCompiler CppCompileError TritonMissing DoubleStreamBlock SingleStreamBlock KSampler true false
    safetensors sha Ctrl
"""
IN_ENGLISH = "\uff08英語\uff09"  # what is said to be
NOT_READ = re.compile(  # code, quotes with their translation, tags, addresses, flags, names in code
    rf"{IN_ENGLISH}.*|`[^`]*`|\*[^*\n]+\*(?=\uff08)|<[^>]*>|\w+://\S*|--[\w-]+|%\d|(?<=x)\d+x?\d*|[\w-]*[_./][\w./-]+", re.ASCII
)
CLASSIC_DRAWS = """
    window.drawn = new Set();
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text) { drawn.add(text); return draw.apply(this, arguments); };
"""


def english_in(text, kept=frozenset()):
    return set(re.findall(r"[A-Za-z][A-Za-z-]+", NOT_READ.sub(" ", text))) - set(KEPT.split()) - kept


def choices_of(server):
    """The values of the nodes' choices, by words, and those that are phrases."""
    nodes = [server.get(f"/object_info/{node}")[node] for node in locales.read("en")["nodeDefs.json"]]
    given = [one for node in nodes for one in prompts.inputs_in_order(node)]
    values = {value for _, kind, options in given for value in (kind if isinstance(kind, list) else options.get("options", []))}
    return {word for value in values for word in value.split()}, {value for value in values if " " in value}


def names_in_code():
    nodes = locales.read("en")["nodeDefs.json"].values()
    return {name for node in nodes for name in (*node["inputs"], *(given["name"] for given in node["outputs"].values()))}


@contextlib.contextmanager
def in_japanese(page):
    try:
        yield page.open(Locale="ja")
    finally:
        page.picture(f"japanese {page.js('() => LiteGraph.vueNodesMode')} {next(_takes)}")
        page.open(Locale="en")


def queue(page):
    """As `run`, whose button has another name in each language."""
    before = page.js("() => kit.ended")
    page.js("() => app.queuePrompt(0)")
    page.until(f"() => kit.ended > {before}")


@BOTH
def test_japanese_nodes_show_no_english(page, server):
    """All nine, with all inputs: what the canvas draws, or the elements of Nodes 2.0, and the values to choose from."""
    words, phrases = choices_of(server)
    page.context.add_init_script(CLASSIC_DRAWS)
    with in_japanese(page):
        page.load({str(at): {"class_type": f"TorchCompileKit{name}", "inputs": {}} for at, name in enumerate(KIT_NODES, 1)})
        page.js(
            """async () => {
                app.graph._nodes.forEach((node, at) => {
                    node.showAdvanced = true;
                    for (const widget of node.widgets) widget.hidden = false;
                    node.pos = [320 * (at % 5), at < 5 ? 0 : 500];
                    node.setSize([310, node.computeSize()[1]]);
                });
                Object.assign(app.canvas.ds, { scale: 0.75, offset: [80, 100] });
                drawn.clear();
                app.canvas.setDirty(true, true);
                await kit.frames();
                await kit.frames();
            }"""
        )
        page.until("() => !LiteGraph.vueNodesMode || document.body.innerText.includes('コンパイルの時期')")
        shown = page.js("""() => (LiteGraph.vueNodesMode
            ? [...document.querySelectorAll("[data-node-id]")].map((node) => node.innerText)
            : [...drawn, ...[...document.querySelectorAll(".torch-compile-kit-report")].map((text) => text.innerText)]
        ).join("\\n")""")
        labels = page.js("""() => app.graph._nodes.flatMap((node) => node.widgets.flatMap(({ options }) =>
            options?.getOptionLabel ? options.values.map((value) => options.getOptionLabel(value)) : []))""")
        assert "コンパイルの時期" in shown and "バックグラウンドで" in shown and "コンパイルなしで実行" in labels, shown
        shown = re.sub(r"^(T|I|N|V|FPS): ?[\d.]+.*$", "", "\n".join([shown, *labels]), flags=re.MULTILINE)  # ComfyUI's counters
        assert not english_in(shown, words) and not [phrase for phrase in phrases if phrase in shown], shown
        page.js("() => { kit.widget('Model', 'compile_when').value = 'before first image'; }")
        assert page.js("async () => (await app.graphToPrompt()).output")["1"]["inputs"]["compile_when"] == "before first image"
    page.load({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}})
    assert page.js("() => kit.widget('Model', 'compile_when').options.getOptionLabel('in background')") == "in background"


@CLASSIC
def test_the_japanese_page_shows_no_english(page, prompt, server):
    """After a run: reports, lines, a notice, menus, the tab, the settings; what follows a line that says so is in English."""
    words, _ = choices_of(server)
    prompt = prompts.with_benchmark(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes=""))
    prompt = prompts.change(prompt, prompts.MODEL_NODE, compile_when="before first image", dynamic="false")
    loader, model, warmup = (prompts.find(prompt, name) for name in ("UNETLoader", prompts.MODEL_NODE, prompts.WARMUP_NODE))
    prompt["81"] = {"class_type": "TorchCompileKitBlockSwap", "inputs": {"model": [loader, 0], "blocks_to_swap": 1}}
    prompt[model]["inputs"]["model"] = ["81", 0]
    prompt["82"] = {"class_type": "TorchCompileKitSaveCache", "inputs": {"model": [warmup, 0], "filename": "japanese"}}
    prompt["83"] = {"class_type": "TorchCompileKitLoadCache", "inputs": {"model": [warmup, 0], "file": "none"}}
    prompt["84"] = {"class_type": "TorchCompileKitVAEChannelsLast", "inputs": {"vae": [prompts.find(prompt, "VAELoader"), 0]}}
    prompt = prompts.change(prompt, "VAEDecode", vae=["84", 0])
    seen = {}
    with in_japanese(page):
        page.load(prompt)
        queue(page)
        page.until_shown("Model", "^準備完了")
        for name in ("Model", "Warmup", "Benchmark", "BlockSwap", "SaveCache", "LoadCache", "VAEChannelsLast"):
            seen[name] = page.js(
                """(name) => {
                    const copy = kit.widget(name, "torch_compile_kit_report").element.cloneNode(true);
                    for (const fold of copy.querySelectorAll("details")) {
                        fold.replaceWith("\\n" + fold.querySelector("summary").textContent);
                    }
                    return copy.textContent;
                }""",
                name,
            )
        headline, figures = seen["Benchmark"].split("以下の数値の見出しは英語です。")
        assert "median" in figures
        seen["Benchmark"] = headline
        page.set("EmptySD3LatentImage", "width", 192)
        page.js(
            """() => {
                for (const node of [kit.node("Warmup"), kit.node("Benchmark")]) {
                    node.disconnectInput(node.findInputSlot("latent_image"));
                }
            }"""
        )
        queue(page)
        page.window.get_by_text("幅 が 128 から 192").first.wait_for()
        seen["notice"] = page.js("() => document.querySelector('.p-toast-message').innerText")
        seen["warnings"] = page.js("() => kit.node('Warmup').torchCompileKitWarnings?.join('\\n') ?? ''")
        seen["menus"] = page.js(
            """() => {
                const menus = ["Model", "Warmup"].flatMap((name) => kit.node(name).getExtraMenuOptions(app.canvas, []) ?? []);
                const extension = app.extensions.find(({ name }) => name === "torch-compile-kit.presets");
                const presets = extension.getNodeMenuItems(kit.node("Model"));
                const below = presets.flatMap(({ submenu }) => submenu.options);
                return [...menus, ...presets, ...below].map((entry) => entry?.content).join("\\n");
            }"""
        )
        assert "プリセット" in seen["menus"] and "詳細な入力を表示" in seen["menus"]
        page.window.get_by_role("button", name="Torch Compile Kit").first.click()
        panel = page.window.locator(".torch-compile-kit")
        panel.get_by_role("button", name="このマシンを確認").click()
        panel.get_by_text(IN_ENGLISH).first.wait_for()
        seen["tab"] = panel.inner_text()
        page.picture("japanese tab")
        page.js("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        page.window.get_by_text("Torch Compile Kit", exact=True).first.click()
        page.window.get_by_text("ディスク上のキャッシュの上限").wait_for()
        seen["settings"] = page.js(
            """() => [...document.querySelectorAll("[role=dialog] *")].map((part) => part.innerText ?? "").filter((text) =>
                text.includes("ディスク上のキャッシュの上限") && text.includes("コンパイルを待ったとき")).at(-1)"""
        )
        page.picture("japanese settings")
    kept = words | names_in_code()
    assert {where: found for where, text in seen.items() if (found := english_in(text, kept))} == {}, seen
    assert all(re.search("[ぁ-んァ-ヶ一-龠]", text) for text in seen.values() if text), seen


def test_japanese_texts_and_help_pages_hold_no_english(server):
    """Also those that no test has seen in the page."""
    words, _ = choices_of(server)
    kept = words | names_in_code() | {"batch"}  # as a line of extra_sizes has it
    found = locales.texts({**locales.read("ja"), "report.json": texts.report("ja")})
    found |= {page.parent.name: page.read_text(encoding="utf-8") for page in help_pages.FOLDER.glob("*/ja.md")}
    found = {where: english_in(text, kept) for where, text in found.items()}
    assert {where: english for where, english in found.items() if english} == {}


@pytest.mark.parametrize("opened", ["nodes 2.0"], indirect=True)
def test_a_page_that_is_opened_anew_in_japanese_shows_japanese_and_keeps_its_values(page, prompt):
    """The last in this renderer: the page stays Japanese."""
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128))
    set_and_reopen(page, "default", 3972, Locale="ja")
    page.window.get_by_text("Torch Compile ウォームアップ").first.wait_for()
    assert page.text("Warmup") == "実行すると状態が表示されます。"
    page.js("() => app.queuePrompt(0)")
    page.until_shown("Warmup", "^128x128 の準備ができました")
    page.until_shown("Model", "^準備完了")
