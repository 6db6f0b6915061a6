"""The pack in ComfyUI's page, as a person has it: headless Chromium, in the classic renderer and in Nodes 2.0."""

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest

from devtools import prompts
from devtools.server import wait_until

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.server,
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page was not looked at"),
]
RENDERERS = {"classic": False, "nodes 2.0": True}
# A folder for pictures of each test's end, and of what the README shows; none by default.
PICTURES = os.environ.get("TORCH_COMPILE_KIT_PICTURES")
# The README's pictures: in which test they are taken, and of which part of the window.
README = {
    "use": ("test_the_node_stands_between_the_loader_and_the_sampler[classic]", (60, 88, 960, 335)),
}
_takes = itertools.count(1)
# Where the renderer makes no difference to our scripts: the second one is for `dev.py test --rest`.
TWINS = pytest.mark.parametrize("opened", ["classic", pytest.param("nodes 2.0", marks=pytest.mark.rest)], indirect=True)
CLASSIC = pytest.mark.parametrize("opened", ["classic"], indirect=True)
BOTH = pytest.mark.parametrize("opened", ["classic", "nodes 2.0"], indirect=True)
# At most ten frames a second: without a GPU each is drawn by the CPU, while a test waits for the server.
FEW_FRAMES = """
    const soon = window.requestAnimationFrame.bind(window);
    window.requestAnimationFrame = (draw) => setTimeout(() => soon(draw), 100);
    window.cancelAnimationFrame = (id) => clearTimeout(id);
"""
HELPERS = """
    window.kit = {
      node: (name) => app.graph._nodes.find((node) => node.comfyClass === "TorchCompileKit" + name || node.comfyClass === name),
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
        """Take one, if they are wanted, and the README's part of it."""
        if not PICTURES:
            return
        self.window.screenshot(path=Path(PICTURES) / f"{name.replace('/', ' ')}.png")
        for part, (where, (x, y, width, height)) in README.items():
            if where == name:
                clip = {"x": x, "y": y, "width": width, "height": height}
                self.window.screenshot(path=Path(PICTURES) / f"readme {part}.png", clip=clip)

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
    assert page.text("Model") == "Status appears here."
    page.run()
    page.until_shown("Model", "^ready")
    if not page.js("() => !!LiteGraph.vueNodesMode"):  # Nodes 2.0 hides them by itself
        shown = page.js("() => kit.node('Model').widgets.filter((widget) => !widget.hidden).map((widget) => widget.name)")
        assert shown == ["mode", "compile_when", "torch_compile_kit_report"]
    set_and_reopen(page, "max-autotune", 3971)
    page.until_shown("Model", "^ready")


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
    assert page.text("VAEChannelsLast") == page.text("FixKeys") == "Status appears here."
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


@TWINS
def test_a_cancelled_warmup_leaves_no_old_report(page, prompt):
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, extra_sizes=""))
    page.run()
    assert page.text("Warmup").startswith("Ready")
    page.set("Warmup", "extra_sizes", "\n".join(f"{128 + 16 * i}x128" for i in range(1, 16)))
    page.set("Model", "backend", "aot_eager")
    over = page.press_run()
    page.until_shown("Warmup", "^Running\\.$")
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
    assert page.text("Warmup") == "Status appears here."


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
    left = Path(page.server.get("/torch-compile-kit/cache")["folder"]) / "0123456789ab"
    left.mkdir()
    (left / "about.json").write_text('{"class": "Block"}')
    (left / "kernel").write_bytes(bytes(3 * 2**20))
    panel = open_panel(page)
    panel.get_by_text("128x128").first.wait_for()
    panel.get_by_text("MiB of 2 GiB").wait_for()
    assert "Flux ready" in panel.inner_text(), panel.inner_text()
    panel.get_by_role("button", name="Check this machine").click()
    panel.get_by_text(re.compile(r"PyTorch [0-9.]+ \(tested\),.*Everything that compiling needs is here", re.S)).wait_for()
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
    page.set("KSampler", "steps", 200)
    panel = open_panel(page)
    over = page.press_run()
    panel.get_by_role("button", name="Wait until ready").click()
    page.until(over)
    model = page.server.get("/torch-compile-kit/report")["models"][-1]
    assert not model["being_compiled"] and model["graphs"] >= 2 and "64x64" in model["sizes"], model
    assert model["seconds_gained"] is None or abs(model["seconds_gained"]) < model["compile_seconds"], "waiting is no step"


@TWINS
def test_the_benchmark_begins_with_one_sentence_and_its_plot_is_shown(page, prompt):
    page.load(prompts.with_benchmark(prompt, steps=4))
    page.run()
    text = page.text("Benchmark")
    assert re.match(r"[\d.]+x as fast|Slower: [\d.]+x the time|No clear difference|Too noisy: repeat", text), text
    assert "a step, median" in text
    assert page.js("() => kit.node('Benchmark').size[0]") >= 520
    page.js("() => { app.canvas.centerOnNode(kit.node('Benchmark')); app.graph.setDirtyCanvas(true, true); }")  # else not drawn
    page.until("() => kit.node('Benchmark').imgs?.length || document.querySelector('img[src*=torch_compile], img[src*=temp]')")
    page.until("() => kit.node('Benchmark').size[1] > 700")
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


@pytest.mark.parametrize("opened", ["nodes 2.0"], indirect=True)
def test_a_page_that_is_opened_anew_in_japanese_shows_japanese_and_keeps_its_values(page, prompt):
    """The last in this renderer: the page stays Japanese."""
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128))
    set_and_reopen(page, "default", 3972, Locale="ja")
    page.window.get_by_text("Torch Compile ウォームアップ").first.wait_for()
    assert page.text("Warmup") == "ここに状態が表示されます。"
    page.js("() => app.queuePrompt(0)")
    page.until_shown("Warmup", "^128x128 の準備ができました")
    page.until_shown("Model", "^準備完了")
