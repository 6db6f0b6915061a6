"""The page in Japanese shows Japanese. In a file that comes after those of the English page, which is loaded anew for it."""

import re

import pytest
from browsing import BOTH, CLASSIC, KIT_NODES, MARKS, NODES_2, set_and_reopen

from devtools import help_pages, locales, prompts, texts

pytest.importorskip("playwright.sync_api")
pytestmark = MARKS

# What stays as it is in Japanese: products, technical names, units, models. A token with "_", "." or "/" is a name in code.
KEPT = """
    Torch Compile Kit torch compile torch-compile-kit ComfyUI TorchCompileModel PyTorch Triton CUDA cuDNN TF fp NVIDIA RTX AMD
    Apple Linux Windows macOS OS PC Python Visual Studio Build Tools Redis redis GPU CPU VRAM RAM GB GiB MB MiB ms JSON
    VAE CLIP LoRA ControlNet Control UNet Transformer GGUF SD SDXL Flux cfg channels last Channels Last NAME sage xformers
    cudaMallocAsync InvalidCxxCompiler CppCompileError TritonMissing DoubleStreamBlock SingleStreamBlock KSampler true false
    safetensors sha Ctrl DeepCache
"""
IN_ENGLISH = "\uff08英語\uff09"  # what is said to be
NOT_READ = re.compile(  # code, quotes with their translation, tags, addresses, flags, names in code, lines of extra_sizes
    rf"{IN_ENGLISH}.*|`[^`]*`|\*[^*\n]+\*(?=\uff08)|<[^>]*>|\w+://\S*|--[\w-]+|%\d|batch(?= \d)"
    r"|(?<=x)\d+x?\d*|[\w-]*[_./][\w./-]+",
    re.ASCII,
)


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


def queue(page):
    """As `run`, whose button has another name in each language."""
    before = page.js("() => kit.ended")
    page.js("() => app.queuePrompt(0)")
    page.until(f"() => kit.ended > {before}")


@NODES_2
def test_a_page_that_is_opened_anew_in_japanese_shows_japanese_and_keeps_its_values(page, prompt):
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128))
    set_and_reopen(page, "default", 3972, Locale="ja")
    page.window.get_by_text("Torch Compile ウォームアップ").first.wait_for()
    assert page.text("Warmup") == "実行すると状態が表示されます。"
    page.js("() => app.queuePrompt(0)")
    page.until_shown("Warmup", "^128x128 の準備ができました")
    page.until_shown("Model", "^準備完了")


@BOTH
def test_japanese_nodes_show_no_english(japanese, server):
    """All nine, with all inputs: what the canvas draws, or the elements of Nodes 2.0, and the values to choose from."""
    words, phrases = choices_of(server)
    japanese.load({str(at): {"class_type": f"TorchCompileKit{name}", "inputs": {}} for at, name in enumerate(KIT_NODES, 1)})
    japanese.js(
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
    japanese.until("() => !LiteGraph.vueNodesMode || document.body.innerText.includes('コンパイルの時期')")
    shown = japanese.js("""() => (LiteGraph.vueNodesMode
        ? [...document.querySelectorAll("[data-node-id]")].map((node) => node.innerText)
        : [...drawn, ...[...document.querySelectorAll(".torch-compile-kit-report")].map((text) => text.innerText)]
    ).join("\\n")""")
    labels = japanese.js("""() => app.graph._nodes.flatMap((node) => node.widgets.flatMap(({ options }) =>
        options?.getOptionLabel ? options.values.map((value) => options.getOptionLabel(value)) : []))""")
    assert "コンパイルの時期" in shown and "バックグラウンドで" in shown and "コンパイルなしで実行" in labels, shown
    shown = re.sub(r"^(T|I|N|V|FPS): ?[\d.]+.*$", "", "\n".join([shown, *labels]), flags=re.MULTILINE)  # ComfyUI's counters
    assert not english_in(shown, words) and not [phrase for phrase in phrases if phrase in shown], shown
    japanese.js("() => { kit.widget('Model', 'compile_when').value = 'before first image'; }")
    assert japanese.js("async () => (await app.graphToPrompt()).output")["1"]["inputs"]["compile_when"] == "before first image"


@CLASSIC
def test_the_japanese_page_shows_no_english(japanese, prompt, server):
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
    japanese.load(prompt)
    queue(japanese)
    japanese.until_shown("Model", "^準備完了")
    for name in ("Model", "Warmup", "Benchmark", "BlockSwap", "SaveCache", "LoadCache", "VAEChannelsLast"):
        seen[name] = japanese.js(
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
    japanese.set("EmptySD3LatentImage", "width", 192)
    japanese.js(
        """() => {
            for (const node of [kit.node("Warmup"), kit.node("Benchmark")]) {
                node.disconnectInput(node.findInputSlot("latent_image"));
            }
        }"""
    )
    queue(japanese)
    japanese.window.get_by_text("幅 が 128 から 192").first.wait_for()
    seen["notice"] = japanese.js("() => document.querySelector('.p-toast-message').innerText")
    seen["warnings"] = japanese.js("() => kit.node('Warmup').torchCompileKitWarnings?.join('\\n') ?? ''")
    seen["menus"] = japanese.js(
        """() => {
            const menus = ["Model", "Warmup"].flatMap((name) => kit.node(name).getExtraMenuOptions(app.canvas, []) ?? []);
            const extension = app.extensions.find(({ name }) => name === "torch-compile-kit.presets");
            const presets = extension.getNodeMenuItems(kit.node("Model"));
            const below = presets.flatMap(({ submenu }) => submenu.options);
            return [...menus, ...presets, ...below].map((entry) => entry?.content).join("\\n");
        }"""
    )
    assert "プリセット" in seen["menus"] and "詳細な入力を表示" in seen["menus"]
    japanese.window.get_by_role("button", name="Torch Compile Kit").first.click()
    panel = japanese.window.locator(".torch-compile-kit")
    panel.get_by_role("button", name="このマシンを確認").click()
    panel.get_by_text(IN_ENGLISH).first.wait_for()
    seen["tab"] = panel.inner_text()
    japanese.picture("japanese tab")
    japanese.js("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    japanese.window.get_by_text("Torch Compile Kit", exact=True).first.click()
    japanese.window.get_by_text("ディスク上のキャッシュの上限").wait_for()
    seen["settings"] = japanese.js(
        """() => [...document.querySelectorAll("[role=dialog] *")].map((part) => part.innerText ?? "").filter((text) =>
            text.includes("ディスク上のキャッシュの上限") && text.includes("コンパイルを待ったとき")).at(-1)"""
    )
    japanese.picture("japanese settings")
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
