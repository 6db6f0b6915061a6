"""The pack in ComfyUI's page, as a person has it: headless Chromium, in the classic renderer and in Nodes 2.0."""

import contextlib
import re
from pathlib import Path

import pytest
from browsing import BOTH, CLASSIC, KIT_NODES, MARKS, NODES_2, TWINS, only_model, set_and_reopen

from devtools import prompts
from devtools.server import wait_until

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = MARKS

# By state of a line, how much its colour differs from what is behind it.
CONTRASTS = """async () => {
    const context = document.createElement("canvas").getContext("2d");
    const luminance = (color, over = color, opacity = 1) => {
        context.clearRect(0, 0, 1, 1);
        for (const [paint, alpha] of [[over, 1], [color, opacity]]) {
            Object.assign(context, { fillStyle: paint, globalAlpha: alpha });
            context.fillRect(0, 0, 1, 1);
        }
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
    const contrast = (element) => {
        const { color, opacity } = getComputedStyle(element), over = behind(element);
        const [one, other] = [luminance(color, over, Number(opacity)), luminance(over)];
        return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    };
    const { element } = kit.widget("Model", "torch_compile_kit_report");
    const found = { tab: contrast(document.querySelector(".torch-compile-kit .quiet")) };
    for (const state of ["compiling", "ready", "faster", "unclear", "slower", "failed"]) {
        const line = { workflow: app.rootGraph.id, node: String(kit.node("Model").id), state, says: ["ready"], seconds: null };
        comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status", line);
        await kit.frames();
        found[state] = contrast(element);
    }
    return found;
}"""


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
    hints = dict.fromkeys(KIT_NODES, "Press Run to see the status.") | {"Model": "Connect it to loader and sampler."}
    hints |= dict.fromkeys(("ControlNet", "VAEChannelsLast"), "Connect its input and its output.")
    hints |= dict.fromkeys(("Warmup", "Benchmark"), "Connect model: the rest comes from the sampler.")
    assert dict(cut) == {f"TorchCompileKit{name}": hint for name, hint in hints.items()}
    assert page.js("() => kit.widget('Model', 'compile_when').options.getOptionLabel('in background')") == "in background"
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


@NODES_2
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
    page.js(
        f"""() => {{
            kit.seen = [];
            const look = () => kit.seen.push([({HEIGHT})(), kit.text("Warmup")]);
            kit.timer = setInterval(look, 50);
            kit.onProgress = look; // a text may stand for less than that
        }}"""
    )
    page.run()
    page.js("() => { clearInterval(kit.timer); kit.onProgress = () => {}; }")
    while_running = [(height, text) for height, text in page.js("() => kit.seen") if re.search(r"\(\d of 2\): ", text)]
    assert any("compiling" in text for _, text in while_running), page.js("() => kit.seen.map(([, text]) => text)")
    assert max(height for height, _ in while_running) <= before + 15, (before, while_running)


@CLASSIC
def test_a_late_answer_to_a_prompt_takes_no_progress_away(page, prompt):
    """The server's threads share one interpreter: what the prompt tells may come before the answer to it."""
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128))
    page.js(
        """() => {
            const { api } = window.comfyAPI.api;
            const fetchApi = api.fetchApi;
            kit.shown = [];
            const look = () => kit.shown.push(kit.text("Warmup"));
            const told = new Promise((resolve) => { kit.onProgress = () => { look(); resolve(); }; });
            api.fetchApi = async function (path) {
                const answer = await fetchApi.apply(this, arguments);
                if (path !== "/prompt") return answer;
                api.fetchApi = fetchApi;
                await told;
                kit.timer = setInterval(look, 5);
                return answer;
            };
        }"""
    )
    page.run()
    page.until_shown("Warmup", "^Ready")
    page.js("() => { clearInterval(kit.timer); kit.onProgress = () => {}; kit.shown.push(kit.text('Warmup')); }")
    shown = page.js("() => kit.shown")
    assert "(1 of 1): " in shown[0] and shown[-1].startswith("Ready") and "Running." not in shown, shown


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


@BOTH
@pytest.mark.parametrize("palette", ["dark", "light"])
def test_a_line_can_be_read_in_both_themes(page, palette):
    """Contrast of 4.5:1 at least between its colours and the node, and in the tab (WCAG 2.2, 1.4.3)."""
    page.js("(palette) => app.extensionManager.setting.set('Comfy.ColorPalette', palette)", palette)
    try:
        page.until(f"() => !!document.querySelector('html.dark-theme, body.dark-theme') === {str(palette == 'dark').lower()}")
        page.load({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}})
        page.js("() => kit.frames()")
        open_panel(page).locator(".quiet").first.wait_for()
        contrasts = page.js(CONTRASTS)
        page.picture(f"theme {palette} {'vue' if page.js('() => !!LiteGraph.vueNodesMode') else 'classic'}")
    finally:
        page.js("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")
    assert len(contrasts) == 7 and min(contrasts.values()) >= 4.5, contrasts


# What a node is told where prompts have few steps, on a GPU.
SHORT_PROMPTS = """() => comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status", {
    workflow: app.rootGraph.id, node: String(kit.node("Model").id),
    state: "unclear", says: ["putOff", 12], seconds: null, begins: "5eed",
})"""


@CLASSIC
def test_a_line_that_came_while_its_node_was_out_of_sight_is_shown_in_whole(page):
    """With its button: a node that is not drawn has no height, by which it could be made taller."""
    page.load({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}})
    page.js("() => { app.canvas.ds.offset = [-5000, -5000]; app.canvas.setDirty(true, true); return kit.frames(); }")
    page.until("() => !kit.widget('Model', 'torch_compile_kit_report').element.clientHeight")
    page.js(SHORT_PROMPTS)
    page.js("() => kit.frames()")
    page.js("() => (app.canvas.centerOnNode(kit.node('Model')), kit.frames())")
    page.until("() => kit.widget('Model', 'torch_compile_kit_report').element.clientHeight")
    page.until(
        """() => {
            const { element } = kit.widget("Model", "torch_compile_kit_report");
            return element.querySelector("button") && element.scrollHeight <= element.clientHeight;
        }"""
    )


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
