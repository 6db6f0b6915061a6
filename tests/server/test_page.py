"""The page's scripts, run by Node with an app and an api that note what they are asked for."""

import json
import re
import shutil
import subprocess

import pytest
from support import ROOT

JS = ROOT / "js"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed: the page's scripts were not run")

STAGE = """
const listeners = {}, toasts = [], said = [], ticks = [];
const setInterval = (tick) => ticks.push(tick);
let extension;
const host = {}; // what a test sets of the host's
const api = { queuePrompt: (...given) => host.queuePrompt(...given), fetchApi: async () => ({ ok: false }) };
api.addEventListener = (name, listener) => (listeners[name] ??= []).push(listener);
const send = (name, detail) => (listeners[name] ?? []).forEach((listener) => listener({ detail }));
const settled = () => new Promise((resolve) => globalThis.setTimeout(resolve, 5));
const toast = { add: (t) => toasts.push(t), remove: (t) => toasts.splice(toasts.indexOf(t), 1) };
const nodes = {};
const app = {
  registerExtension: (given) => { extension = given; },
  extensionManager: { toast },
  ui: { settings: new EventTarget() },
  graph: { id: "open", getNodeById: (id) => nodes[id], get nodes() { return Object.values(nodes).filter(Boolean); } },
};
const document = { querySelector: () => "dark-theme", createElement: () => ({
  style: {},
  replaceChildren(...parts) { this.textContent = ""; this.append(...parts); },
  append(...parts) { this.textContent = (this.textContent ?? "") + parts.map((part) => part.textContent ?? part).join("|"); },
}) };
const requestAnimationFrame = () => {};
const created = (id, comfyClass) => {
  const node = nodes[id] = { id, comfyClass, widgets: [], size: [200, 100], setSize(size) { this.size = size; } };
  Object.assign(node, { inputs: [{ name: "model", link: 1 }], outputs: [{ links: [1] }] });
  node.addDOMWidget = (name, type, element) => (node.widgets.push({ name, element }), node.widgets.at(-1));
  extension.nodeCreated(node);
  return node;
};
const text = (node) => node.widgets[0]?.element.textContent;
"""


def source(script):
    """What it does, without what it is to other scripts."""
    return re.sub(r"^import .*$|^export ", "", (JS / script).read_text(), flags=re.MULTILINE)


def play(script, scene, before="const showsNotices = () => true;", first=""):
    """What a scene tells with `said.push`, after the script's extension has been set up. `first`: before all scripts."""
    english = json.loads((ROOT / "locales" / "en" / "main.json").read_text())["torchCompileKit"]
    common = f"{source('graph.js')}\n{source('words.js')}\n{source('running.js')}\nwords = {json.dumps(english)};"
    code = f"{STAGE}\n{first}\n{common}\n{before}\n{source(script)}\nawait extension.setup?.();\n{scene}"
    code += "\nconsole.log(JSON.stringify(said));"
    done = subprocess.run(["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_notice_is_information_until_a_newer_one_or_a_warmup():
    scene = """
        nodes["3"] = { comfyClass: "TorchCompileKitWarmup" };
        nodes["4"] = { comfyClass: "KSampler" };
        const told = () => said.push(toasts.map((t) => t.detail));
        send("torch-compile-kit.compiled", { model: "Flux", text: "a new size", warmups: ["3"] });
        send("torch-compile-kit.compiled", { model: "Wan", text: "a LoRA", warmups: ["5"] });
        send("execution_start", {});
        send("executed", { node: "4" });
        send("execution_cached", { nodes: ["3"] });
        send("executed", { node: "3" });
        send("execution_cached", { nodes: [] });
        await settled();
        told();
        said.push(toasts.map(({ severity, life }) => [severity, life]));
        send("torch-compile-kit.compiled", { model: "Flux", text: "another size", warmups: ["3"] });
        told();
        send("executed", { node: "3" });
        await settled();
        told();
    """
    assert play("compile_notice.js", scene, "const offer = () => {}, showsNotices = () => true;") == [
        ["a new size", "a LoRA"],
        [["info", 10000], ["info", 10000]],
        ["a LoRA", "another size"],
        ["a LoRA"],
    ]


@pytest.mark.parametrize("size", ["96x64", "832x480x33", "64x64 batch 2"])
def test_a_size_that_was_compiled_outside_the_warmup_can_be_added_with_a_button(size):
    report = source("node_report.js").partition("app.registerExtension")[0] + "\nconst showsNotices = () => true;"
    scene = f"""
        const parts = [];
        document.createElement = (tag) => ({{ tag, style: {{}}, append: (part) => parts.push(part) }});
        const sizes = {{ name: "extra_sizes", value: "512x512" }};
        const node = {{ comfyClass: "TorchCompileKitWarmup", widgets: [sizes], size: [1, 1] }};
        node.addDOMWidget = (name, type, element) => (node.widgets.push({{ name, element }}), node.widgets.at(-1));
        const inside = {{ subgraph: {{ getNodeById: (id) => (id === "3" ? node : undefined) }} }};
        app.graph = {{ id: "open", getNodeById: (id) => (id === "7" ? inside : {{ comfyClass: "KSampler" }}) }};
        const hear = (size, workflow, warmups = ["7:3", "8"]) => {{
          send("torch-compile-kit.compiled", {{ model: "Flux", text: "something changed.", size, workflow, warmups }});
          said.push(parts.length);
        }};
        hear(null, "open");
        hear("8x8", "another");
        hear("8x8", "open", []); // of another model
        hear("{size}", "open");
        said.push(parts[0].textContent);
        parts[0].onclick();
        said.push(sizes.value, parts.length, node.torchCompileKitSize ?? null);
    """
    assert play("compile_notice.js", scene, report) == [0, 0, 0, 1, f"Add {size} to extra_sizes", f"512x512\n{size}", 1, None]


def test_that_button_is_there_again_when_the_nodes_are_made_anew():
    """Another tab, undo and redo do that."""
    scene = """
        const made = (sizes, id = "3") => {
          nodes[id] = { comfyClass: "TorchCompileKitWarmup", widgets: [{ name: "extra_sizes", value: sizes }] };
        };
        app.graph.id = "another";
        send("torch-compile-kit.compiled", { model: "Flux", text: "", size: "8x8", workflow: "open", warmups: ["3"] });
        made("");
        extension.afterConfigureGraph();
        app.graph.id = "open";
        extension.afterConfigureGraph();
        made("512x512\\n8x8"); // it was pressed
        extension.afterConfigureGraph();
        made("512x512");
        extension.afterConfigureGraph();
        send("executed", { node: "3" });
        await settled();
        extension.afterConfigureGraph();
    """
    offers = "const offer = (_node, size) => { said.push(size ?? null); }, showsNotices = () => true;"
    assert play("compile_notice.js", scene, offers) == ["8x8", "8x8", None]


@pytest.mark.parametrize(
    "event, expected", [("execution_interrupted", "Cancelled"), ("execution_error", "Stopped by an error")]
)
def test_an_old_report_does_not_stay_over_a_run_that_gave_none(event, expected):
    scene = f"""
        const node = created("3", "TorchCompileKitWarmup"), other = created("4", "TorchCompileKitBenchmark");
        for (const n of [node, other]) n.onExecuted({{ text: ["two graphs"] }});
        await settled();
        send("execution_start", {{}});
        send("executing", "3");
        await settled();
        said.push(text(node));
        send("{event}", {{}});
        said.push(text(node), text(other));
    """
    running, after, other = play("node_report.js", scene)
    assert running == "Running." and after.startswith(expected) and other == "two graphs"


def test_what_refuses_or_ends_a_prompt_stands_in_the_node_in_red_until_the_next_one():
    scene = """
        const node = created("3", "TorchCompileKitModel"), warmup = created("4", "TorchCompileKitWarmup");
        created("9", "KSampler");
        const look = () => said.push([text(node), text(warmup), node.widgets[0].element.style.color]);
        const run = async (answer) => {
          host.queuePrompt = answer;
          await api.queuePrompt(0, { workflow: { id: "open" } }).catch(() => {});
          await settled();
        };
        const refused = { type: "custom_validation_failed", message: "Custom", details: "extra_sizes - extra_sizes = 'x': no" };
        const missing = { type: "required_input_missing", message: "Required input is missing", details: "model" };
        const errors = { 4: { errors: [refused, missing] }, 9: { errors: [refused] } };
        const error = Object.assign(new Error(), { response: { node_errors: errors } });
        await run(async () => { throw error; });
        look();
        await run(async () => ({ prompt_id: "1", node_errors: {} }));
        look();
        send("execution_start", { prompt_id: "1" });
        const of = (node_id, exception_type) => ({ node_id, exception_type, exception_message: "only_blocks: no block\\n" });
        send("execution_error", of("3", "ValueError"));
        await settled();
        look();
        send("torch-compile-kit.status", { workflow: "open", node: "3", state: "ready", says: ["ready"], seconds: null });
        look();
        await run(async () => ({ prompt_id: "2" }));
        look();
        send("execution_start", { prompt_id: "2" });
        send("execution_error", of("9", "torch_compile_kit.BlockCompileError"));
        await settled();
        look();
        await run(async () => { throw new Error("the server is gone"); });
        send("execution_error", of("9", "RuntimeError"));
        await settled();
        look();
    """
    red, grey = "#f09090", "#b0b0b0"
    assert play("node_report.js", scene) == [
        [EMPTY, "extra_sizes = 'x': no\nRequired input is missing: model", None],
        [EMPTY, EMPTY, None],
        ["only_blocks: no block", EMPTY, red],
        ["only_blocks: no block", EMPTY, red],
        ["ready", EMPTY, grey],
        ["only_blocks: no block", EMPTY, red],
        ["ready", EMPTY, grey],
    ]


def test_a_server_that_is_gone_in_the_middle_of_a_node_leaves_no_text():
    scene = """
        const node = created("3", "TorchCompileKitWarmup");
        send("execution_start", {});
        send("executing", "3");
        await settled();
        send("torch-compile-kit.progress", { workflow: "open", node: "3", text: "compiling, 34 s" });
        said.push(text(node));
        send("reconnected");
        said.push(text(node));
        send("executing", "3"); // it was the connection alone
        await settled();
        said.push(text(node));
        const next = [1, "next", {}, { extra_pnginfo: { workflow: { id: "another" } } }];
        api.fetchApi = async () => ({ json: async () => ({ queue_running: [next] }) });
        send("reconnected"); // meanwhile the next prompt, of another workflow, has begun
        send("executing", "3");
        await settled();
        said.push(text(node));
        api.fetchApi = async () => ({ json: async () => { throw new SyntaxError("a login page"); } });
        send("reconnected");
        send("executing", "3");
        await settled();
        said.push(text(node));
    """
    assert play("node_report.js", scene) == ["compiling, 34 s", EMPTY, "Running.", EMPTY, "Running."]


def test_a_page_that_is_opened_anew_learns_what_runs_before_its_extensions_are_set_up():
    """Also whose it is: what other workflows run is not told of the nodes with the same ids. ComfyUI tells such a page the node
    alone, once."""
    first = """
        api.initialClientId = "me";
        const of = (id, client_id) => [1, id, {}, { client_id, extra_pnginfo: { workflow: { id } } }];
        api.fetchApi = async (path) => ({
          ok: path === "/queue", json: async () => ({ queue_running: [of("a copy of it", "another"), of("open", "me")] }),
        });
    """
    before = """
        app.registerExtension = (given) => {
          extension = { ...given, setup: () => (send("executing", "3"), given.setup()) };
        };
    """
    scene = """
        const opened = async (id) => {
          app.graph.id = id;
          const node = created("3", "TorchCompileKitBenchmark");
          extension.afterConfigureGraph();
          await new Promise((resolve) => globalThis.setTimeout(resolve, 150));
          said.push(text(node));
        };
        await opened("open");
        await opened("a copy of it");
    """
    assert play("node_report.js", scene, before, first) == ["Running.", EMPTY]


def test_a_report_that_came_is_kept_when_a_later_node_is_cancelled():
    scene = """
        const node = created("3", "TorchCompileKitWarmup");
        created("9", "KSampler");
        send("execution_start", {});
        send("executing", "3");
        await settled();
        node.onExecuted({ text: ["two graphs"] });
        send("executing", "9");
        send("executing", null);
        await settled();
        send("execution_interrupted", {});
        said.push(text(node));
    """
    assert play("node_report.js", scene) == ["two graphs"]


def test_a_node_of_the_workflow_that_runs_tells_of_it_and_no_other_of_its_id():
    """Two tabs of the page's own; a prompt may begin, and end, before the page knows how it is called."""
    scene = """
        const node = created("3", "TorchCompileKitWarmup");
        const runs = async (workflow, open) => {
          let answer;
          app.graph.id = workflow;
          host.queuePrompt = () => new Promise((resolve) => { answer = () => resolve({ prompt_id: workflow }); });
          api.queuePrompt(0, { workflow: { id: workflow } });
          send("execution_start", { prompt_id: workflow });
          app.graph.id = open;
          send("executing", "3");
          answer();
          await settled();
          said.push(text(node));
        };
        await runs("open", "open");
        node.onExecuted({ text: ["two graphs"] });
        await settled();
        await runs("another", "open");
        node.onExecuted({ text: ["nine graphs"] });
        send("execution_interrupted", {});
        await settled();
        said.push(text(node));
        await runs("another", "open");
        app.graph.id = "another"; // that tab is opened while it runs
        api.fetchApi = async () => ({ ok: false });
        extension.afterConfigureGraph();
        await settled();
        await new Promise((resolve) => setTimeout(resolve, 120));
        said.push(text(node));
    """
    told = play("node_report.js", scene)
    assert told == ["Running.", "two graphs", "two graphs", "two graphs", "Running."]


COMPILING = '{ state: "compiling", says: ["forSeconds", ["compilingKinds", 2]], seconds: 2 }'
EMPTY = "Press Run to see the status."


def test_the_model_node_says_how_it_goes():
    """Also inside a subgraph, and after the page was loaded anew."""
    scene = f"""
        const inner = created("3", "TorchCompileKitModel");
        nodes["3"] = undefined;
        nodes["7"] = {{ subgraph: {{ getNodeById: (id) => (id === "3" ? inner : undefined) }} }};
        const outer = created("5", "TorchCompileKitModel");
        said.push(text(inner));
        send("executing", "5");
        send("torch-compile-kit.status", {{ workflow: "open", node: "7:3", ...{COMPILING} }});
        said.push(text(inner), text(outer));
        const asked = [];
        const says = ["readyBut", ["faster", "42%", "0.059", "0.034"]];
        const lines = {{ 5: {{ state: "faster", says, seconds: null }}, 99: {{}} }};
        api.clientId = "me";
        api.fetchApi = async (path) => (asked.push(path), {{ ok: true, json: async () => lines }});
        extension.afterConfigureGraph();
        await settled();
        said.push(text(outer), asked);
    """
    ready = "ready: 42% faster (0.059 -> 0.034 s a step)"
    asked = ["/torch-compile-kit/status?client_id=me&workflow=open&language="]
    assert play("node_report.js", scene) == [EMPTY, "compiling 2 kinds of blocks, 2 s", EMPTY, ready, asked]


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("Model", "Connect it to loader and sampler."),
        ("ControlNet", "Connect its input and its output."),
        ("Warmup", "Connect model: the rest comes from the sampler."),
        ("FixKeys", EMPTY),
    ],
)
def test_a_node_that_is_not_connected_says_what_it_lacks(kind, hint):
    """ComfyUI runs a prompt without a word around such a node, which would ask to press Run for ever."""
    scene = f"""
        const node = created("3", "TorchCompileKit{kind}");
        const after = async (link, links) => {{
          Object.assign(node.inputs[0], {{ link }});
          Object.assign(node.outputs[0], {{ links }});
          node.onConnectionsChange();
          await settled();
          said.push(text(node));
        }};
        await after(null, null);
        await after(1, []);
        await after(1, [2]);
        await after(null, [2]);
        node.mode = 4; // bypassed
        await after(null, null);
    """
    without_output = EMPTY if kind == "Warmup" else hint
    assert play("node_report.js", scene) == [hint, without_output, EMPTY, hint, EMPTY]


def test_compiling_begins_now_with_a_button_on_the_line():
    """A server that was started anew knows nothing of it; the button can be pressed again."""
    scene = """
        const makes = document.createElement;
        const buttons = [];
        document.createElement = (tag) => {
          const made = makes(tag);
          if (tag === "button") buttons.push(made);
          return made;
        };
        const node = created("3", "TorchCompileKitModel");
        const line = { workflow: "open", node: "3", state: "unclear", says: ["putOff", 12], seconds: null, begins: "5eed" };
        send("torch-compile-kit.status", line);
        ticks.forEach((tick) => tick());
        said.push(buttons.length, text(node));
        let begins = false;
        api.fetchApi = async (path, sent) => {
          said.push([path, sent.method, sent.headers["Content-Type"], sent.body]);
          return { ok: true, json: async () => ({ begins }) };
        };
        await buttons[0].onclick();
        said.push(text(node));
        begins = true;
        await buttons[0].onclick();
        said.push(text(node), buttons.length);
        send("torch-compile-kit.status", { ...line, state: "ready", says: ["ready"], begins: null });
        said.push(text(node));
    """
    says = "not compiled yet: it would take longer than it saves. Sampler runs until it begins: about 12Compile now"
    asked = ["/torch-compile-kit/begin", "POST", "application/json", '{"model":"5eed"}']
    begun = "compiling begins with the next step"
    assert play("node_report.js", scene) == [1, says, asked, says, asked, begun, 1, "ready"]


def test_a_server_that_was_started_anew_compiles_nothing():
    """But for what it has told of since it was asked."""
    scene = f"""
        const [gone, there, told] = ["3", "5", "8"].map((id) => created(id, "TorchCompileKitModel"));
        for (const id of ["3", "5", "8"]) send("torch-compile-kit.status", {{ workflow: "open", node: id, ...{COMPILING} }});
        const failed = {{ state: "failed", says: ["runsUncompiled", "Block"], seconds: null }};
        api.fetchApi = async () => {{
          send("torch-compile-kit.status", {{ workflow: "open", node: "8", ...failed }});
          return {{ ok: true, json: async () => ({{ 5: {{ state: "ready", says: ["ready"], seconds: null }} }}) }};
        }};
        send("reconnected");
        await new Promise((resolve) => setTimeout(resolve, 5));
        said.push(text(gone), gone.widgets[0].element.style.color, text(there), text(told));
    """
    gone, color, there, told = play("node_report.js", scene)
    assert (gone, color) == (EMPTY, "") and there == "ready" and "Block" in told, (there, told)


def test_a_line_of_another_workflow_is_not_shown():
    """Whose nodes have the same ids: in another tab, or opened while the server was asked."""
    scene = f"""
        const node = created("3", "TorchCompileKitModel");
        send("torch-compile-kit.status", {{ workflow: "another", node: "3", ...{COMPILING} }});
        send("torch-compile-kit.status", {{ workflow: null, node: "3", ...{COMPILING} }});
        said.push(text(node));
        api.fetchApi = async () => {{
          app.graph.id = "opened meanwhile";
          return {{ ok: true, json: async () => ({{ 3: {COMPILING} }}) }};
        }};
        extension.afterConfigureGraph();
        await settled();
        said.push(text(node));
    """
    assert play("node_report.js", scene) == [EMPTY, EMPTY]


def test_seconds_go_on_and_a_line_goes_with_its_use_and_follows_the_language():
    scene = f"""
        let now = 10_000;
        Date.now = () => now;
        const node = created("3", "TorchCompileKitModel");
        send("torch-compile-kit.status", {{ workflow: "open", node: "3", ...{COMPILING} }});
        now += 3000, ticks.forEach((tick) => tick());
        said.push(text(node), node.widgets[0].element.style.color);
        const german = {{ compilingKinds: "kompiliert %1 Arten" }};
        const all = {{ en: {{ torchCompileKit: words }}, de: {{ torchCompileKit: german }} }};
        api.fetchApi = async () => ({{ json: async () => all }});
        const change = new Event("Comfy.Locale.change");
        change.detail = {{ value: "de" }};
        app.ui.settings.dispatchEvent(change);
        await new Promise((resolve) => setTimeout(resolve, 5));
        said.push(text(node));
        node.mode = 4; // bypassed
        ticks.forEach((tick) => tick());
        said.push(text(node), node.widgets[0].element.style.color);
        send("torch-compile-kit.status", {{ workflow: "open", node: "3", ...{COMPILING} }});
        said.push(text(node));
        node.mode = 0;
        for (const state of ["", "unclear", "slower", "ready", "faster"]) {{
          const says = state ? ["readyBut", ["aStep", "1.000"]] : [];
          send("torch-compile-kit.status", {{ workflow: "open", node: "3", state, says, seconds: null }});
          said.push([text(node), node.widgets[0].element.style.color]);
        }}
    """
    compiling, color, german, *bypassed, gone, grey, amber, ready, green = play("node_report.js", scene)
    assert (compiling, german) == ("compiling 2 kinds of blocks, 5 s", "kompiliert 2 Arten, 5 s")
    assert bypassed == [EMPTY, "", EMPTY] and gone == [EMPTY, ""]
    a_step = "ready: 1.000 s a step; Torch Compile Benchmark compares it with uncompiled"
    assert grey == [a_step, "#b0b0b0"] and amber == [a_step, color]
    assert ready == grey and green[1] == "#60c060", "green is faster and nothing else"


def test_advanced_inputs_are_hidden_in_the_classic_renderer_until_they_are_asked_for():
    scene = """
        globalThis.LiteGraph = { vueNodesMode: false };
        const made = (names) => ({
          comfyClass: "TorchCompileKitModel", size: [200, 300], setSize: () => {}, computeSize: () => [200, 100],
          widgets: names.map((name) => ({ name, options: { advanced: name !== "mode" } })),
        });
        const hidden = (node) => node.widgets.map((widget) => widget.hidden ?? false);
        const node = made(["mode", "backend"]);
        extension.nodeCreated(node);
        said.push(hidden(node));
        const [entry] = node.getExtraMenuOptions(null, []);
        entry.callback();
        said.push(entry.content, hidden(node), node.getExtraMenuOptions(null, [])[0].content);
        const linked = made(["mode", "backend"]);
        extension.nodeCreated(linked);
        linked.inputs = [{ widget: { name: "backend" }, link: 4 }];
        extension.loadedGraphNode(linked);
        said.push(hidden(linked));
        LiteGraph.vueNodesMode = true; // Nodes 2.0 folds them itself
        const other = made(["mode", "backend"]);
        extension.nodeCreated(other);
        said.push(hidden(other), other.getExtraMenuOptions(null, []).length);
    """
    assert play("advanced_inputs.js", scene) == [
        [False, True], "Show advanced inputs", [False, False], "Hide advanced inputs", [False, False], [False, False], 0
    ]  # fmt: skip


GRAPH = """
    const warn = (node, lines) => { node.torchCompileKitWarnings = lines; };
    const links = new Map();
    const graph = { links, nodes: Object.values(nodes), getNodeById: (id) => nodes[id], getLink: (id) => links.get(id) };
    app.graph = graph;
    const put = (id, comfyClass, inputs, outputs, widgets = {}) => {
      const node = nodes[id] = { id, comfyClass, title: comfyClass, graph };
      node.inputs = inputs.map((name) => ({ name, link: null }));
      node.outputs = outputs.map((type) => ({ type, links: [] }));
      node.widgets = Object.entries(widgets).map(([name, value]) => ({ name, value }));
      node.connect = (slot, target, at) => {
        links.set(links.size + 1, { origin_id: id, origin_slot: slot, target_id: target.id, target_slot: at });
        target.inputs[at].link = links.size;
        node.outputs[slot].links.push(links.size);
      };
      graph.nodes = Object.values(nodes);
      extension.nodeCreated(node);
      return node;
    };
    const values = (node) => Object.fromEntries(node.widgets.map((widget) => [widget.name, widget.value]));
    const from = (node) => node.inputs.map((input) => links.get(input.link)?.origin_id ?? null);
    const compile = put(1, "TorchCompileKitModel", ["model"], ["MODEL"]);
    const prompt = put(2, "CLIPTextEncode", ["clip"], ["CONDITIONING"]);
    const negative = put(3, "CLIPTextEncode", ["clip"], ["CONDITIONING"]);
    const latent = put(4, "EmptyLatentImage", [], ["LATENT"], { width: 832, height: 1216, batch_size: 1 });
    const sizes = { width: 1024, height: 1024, length: 1, batch_size: 1, cfg: 1 };
    const warmup = put(5, "TorchCompileKitWarmup", ["model", "positive", "negative", "latent_image"], ["MODEL"], sizes);
    compile.connect(0, warmup, 0);
"""
KSAMPLER = """
    const sampler = put(6, "KSampler", ["model", "positive", "negative", "latent_image"], ["LATENT"], { cfg: 5, steps: 20 });
    prompt.connect(0, sampler, 1), negative.connect(0, sampler, 2), latent.connect(0, sampler, 3);
"""


def test_a_warmup_takes_what_its_sampler_has():
    scene = """
        warmup.connect(0, sampler, 0);
        warmup.onConnectionsChange(2, 0, true);
        await settled();
        said.push(from(warmup), values(warmup));
        said.push(warmup.widgets.filter((widget) => widget.disabled).map((widget) => widget.name));
        said.push(warmup.torchCompileKitWarnings ?? []);
        sampler.widgets[0].value = 7;
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings);
        warmup.getExtraMenuOptions()[0].callback();
        said.push(values(warmup).cfg, warmup.torchCompileKitWarnings);
    """
    filled, values, disabled, agreed, changed, cfg, again = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert filled == [1, 2, 3, 4] and values["cfg"] == 5
    assert disabled == ["width", "height", "length", "batch_size"], "the latent has these"
    assert agreed == [] and changed == ["cfg is 5 here, 7 in KSampler."]
    assert cfg == 7 and again == []


@pytest.mark.parametrize("line", ["832x1216 batch 1", "832 X 1216", " 832x1216"])
def test_a_listed_size_may_be_spelled_as_the_server_takes_it(line):
    scene = f"""
        warmup.widgets.push({{ name: "extra_sizes", value: "512x512\\n{line}" }});
        warmup.connect(0, sampler, 0), prompt.connect(0, warmup, 1), negative.connect(0, warmup, 2);
        sampler.widgets[0].value = 1;
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings ?? []);
    """
    assert play("from_sampler.js", GRAPH + KSAMPLER + scene) == [[]]


def test_what_the_user_has_connected_stays_and_is_compared():
    scene = """
        const own = put(8, "CLIPTextEncode", ["clip"], ["CONDITIONING"]);
        own.connect(0, warmup, 1), own.connect(0, warmup, 2);
        latent.connect(0, warmup, 3);
        warmup.connect(0, sampler, 0);
        warmup.onConnectionsChange(2, 0, true);
        await settled();
        said.push(from(warmup), values(warmup).cfg, warmup.torchCompileKitWarnings);
    """
    filled, cfg, warned = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert filled == [1, 8, 8, 4] and cfg == 1
    assert warned == [
        "positive is another than that of KSampler.",
        "negative is another than that of KSampler.",
        "cfg is 1 here, 5 in KSampler.",
    ]


def test_what_the_user_has_set_or_taken_off_stays_when_something_else_is_connected():
    scene = """
        warmup.inputs.push({ name: "vae", link: null });
        prompt.connect(0, warmup, 1), negative.connect(0, warmup, 2), warmup.connect(0, sampler, 0);
        const connected = async (type, index) => {
          warmup.onConnectionsChange(type, index, true);
          await settled();
          said.push(from(warmup)[3], values(warmup).cfg);
        };
        await connected(1, 4); // the vae
        await connected(1, 0); // the model: the latent alone is filled
    """
    assert play("from_sampler.js", GRAPH + KSAMPLER + scene) == [None, 1, 4, 1]


def test_a_warning_names_an_input_as_the_page_does():
    scene = """
        for (const input of warmup.inputs) input.localized_name = `the ${input.name}`;
        latent.connect(0, warmup, 1), prompt.connect(0, warmup, 2);
        warmup.connect(0, sampler, 0);
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings.slice(0, 2));
    """
    ((positive, negative),) = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert positive == "the positive is another than that of KSampler." and negative.startswith("the negative is another")


def test_guiders_and_samplers_apart_and_a_size_without_a_latent():
    scene = """
        const guider = put(6, "BasicGuider", ["model", "conditioning"], ["GUIDER"]);
        const sampler = put(7, "SamplerCustomAdvanced", ["noise", "guider", "sampler", "sigmas", "latent_image"], ["LATENT"]);
        prompt.connect(0, guider, 1);
        guider.connect(0, sampler, 1);
        latent.connect(0, sampler, 4);
        prompt.connect(0, warmup, 1), prompt.connect(0, warmup, 2);
        warmup.connect(0, guider, 0);
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings);
        warmup.getExtraMenuOptions()[0].callback();
        said.push(from(warmup), warmup.torchCompileKitWarnings);
    """
    warned, filled, again = play("from_sampler.js", GRAPH + scene)
    assert warned == ["width is 1024 here, 832 in EmptyLatentImage.", "height is 1024 here, 1216 in EmptyLatentImage."]
    assert filled == [1, 2, 2, 4] and again == []


def test_what_comes_from_outside_of_a_subgraph_is_nobodys():
    """An input of the subgraph is no node: it is neither connected nor compared, and the page goes on."""
    scene = """
        const inside = { id: 90, origin_id: -10, origin_slot: 0, target_id: 6, target_slot: 3 };
        links.set(90, inside), sampler.inputs[3].link = 90;
        links.set(91, { ...inside, id: 91, target_slot: 1 }), sampler.inputs[1].link = 91;
        warmup.connect(0, sampler, 0);
        send("graphChanged");
        warmup.getExtraMenuOptions()[0].callback();
        said.push(from(warmup), warmup.torchCompileKitWarnings ?? []);
    """
    filled, warned = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert filled == [1, None, 3, None] and warned == []


def test_a_size_that_is_linked_is_not_compared():
    scene = """
        latent.inputs.push({ name: "width", link: 77 });
        prompt.connect(0, warmup, 1), negative.connect(0, warmup, 2), warmup.widgets.find((w) => w.name === "cfg").value = 5;
        warmup.connect(0, sampler, 0);
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings);
    """
    (warned,) = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert warned == ["height is 1024 here, 1216 in EmptyLatentImage."]


def test_a_benchmark_beside_the_sampler_and_a_graph_that_is_being_loaded():
    scene = """
        const inputs = ["model", "positive", "negative", "latent_image"];
        const measured = put(9, "TorchCompileKitBenchmark", inputs, ["IMAGE"], { steps: 4, cfg: 1 });
        compile.connect(0, sampler, 0);
        app.configuringGraph = true;
        compile.connect(0, measured, 0);
        measured.onConnectionsChange(1, 0, true);
        await settled();
        said.push(from(measured));
        app.configuringGraph = false;
        measured.onConnectionsChange(1, 0, true);
        await settled();
        said.push(from(measured), values(measured));
    """
    loading, filled, values = play("from_sampler.js", GRAPH + KSAMPLER + scene)
    assert loading == [1, None, None, None] and filled == [1, 2, 3, 4] and values == {"steps": 20, "cfg": 5}


def test_the_details_of_a_report_are_folded(engine):
    report = json.dumps(f"Ready for 64x64.\nInstall g++.\n{engine('messages.report').RULE}\nFlux: inductor")
    scene = f"""
        const node = created("7", "TorchCompileKitWarmup");
        node.onExecuted({{ text: [{report}] }});
        await settled();
        said.push(text(node));
    """
    assert play("node_report.js", scene) == ["Ready for 64x64.\nInstall g++.details|Flux: inductor"]


def test_reports_come_back_with_the_outputs_of_another_tab():
    scene = """
        const node = created("7", "TorchCompileKitWarmup");
        created("8", "TorchCompileKitModel");
        api.fetchApi = async () => ({ ok: true, json: async () => ({}) });
        extension.afterConfigureGraph();
        await settled();
        app.extensionManager.workflow = { activeWorkflow: { activeState: { id: "of before" } } };
        await new Promise((resolve) => setTimeout(resolve, 250));
        app.nodeOutputs = { 7: { text: ["Ready for 64x64."] }, 8: { text: ["of old"] }, 9: { text: ["gone"] }, 10: {} };
        app.extensionManager.workflow.activeWorkflow.activeState.id = "open"; // another pack has taken a while
        await new Promise((resolve) => setTimeout(resolve, 150));
        said.push(text(node), text(nodes[8]));
    """
    assert play("node_report.js", scene) == ["Ready for 64x64.", EMPTY]


@pytest.mark.parametrize("key", ["uuid:3", "7:3"])
def test_reports_inside_subgraphs_come_back_by_the_pages_key_or_the_servers(key):
    scene = f"""
        const inner = created("3", "TorchCompileKitWarmup");
        const subgraph = {{ id: "uuid", isRootGraph: false, nodes: [inner] }};
        subgraph.getNodeById = (id) => (id === "3" ? inner : undefined);
        inner.graph = subgraph;
        nodes["7"] = {{ id: "7", subgraph }};
        const outer = created("3", "TorchCompileKitWarmup");
        api.fetchApi = async () => ({{ ok: false }});
        const opened = async () => {{
          extension.afterConfigureGraph();
          await new Promise((resolve) => setTimeout(resolve, 150));
          said.push(text(inner), text(outer));
        }};
        host.queuePrompt = async () => ({{ prompt_id: "1" }});
        await api.queuePrompt(0, {{ workflow: {{ id: "another" }} }});
        send("execution_start", {{ prompt_id: "1" }});
        app.nodeOutputs = {{ "{key}": {{ text: ["of another"] }} }};
        send("executed", {{ node: "7:3" }});
        await opened();
        await api.queuePrompt(0, {{ workflow: {{ id: "open" }} }});
        send("execution_start", {{ prompt_id: "1" }});
        app.nodeOutputs["{key}"].text = ["Ready."];
        send("executed", {{ node: "7:3" }});
        await opened();
    """
    assert play("node_report.js", scene) == [EMPTY, EMPTY, "Ready.", EMPTY]


def test_what_a_workflow_has_put_out_is_not_another_ones_report_when_that_is_opened_again():
    scene = """
        let node = created("7", "TorchCompileKitWarmup");
        host.queuePrompt = async () => ({ prompt_id: "1" });
        api.fetchApi = async () => ({ ok: false });
        for (const runs of ["another", "open"]) {
          await api.queuePrompt(0, { workflow: { id: runs } });
          send("execution_start", { prompt_id: "1" });
          app.nodeOutputs = { 7: { text: [`of ${runs}`] } }; // the page does so
          send("executed", { node: "7" });
          await settled();
          node = created("7", "TorchCompileKitWarmup");
          extension.afterConfigureGraph();
          await new Promise((resolve) => setTimeout(resolve, 150));
          said.push(text(node));
        }
    """
    assert play("node_report.js", scene) == [EMPTY, "of open"]


def test_texts_that_did_not_come_are_asked_for_again():
    scene = """
        console.warn = () => {};
        api.fetchApi = async () => { throw new Error("the server starts"); };
        await wordsLoaded();
        api.fetchApi = async () => ({ json: async () => ({ en: { torchCompileKit: { ...words, statusHere: "here" } } }) });
        await wordsLoaded();
        said.push(say("statusHere"));
    """
    assert play("node_report.js", scene) == ["here"]


def test_a_preset_sets_what_it_names_and_puts_back_the_rest():
    scene = """
        const node = { comfyClass: "TorchCompileKitModel", widgets: [], constructor: { nodeData: { input: {
          required: { mode: [[], { default: "auto" }], cache_limit: ["INT", { default: 0 }] },
          optional: { only_blocks: ["STRING", { default: "" }], compile_when: [[], { default: "in background" }] },
        } } } };
        const heard = [];
        const values = { mode: "default", cache_limit: 7, only_blocks: "a.*", compile_when: "before first image", report: "" };
        for (const [name, value] of Object.entries(values))
          node.widgets.push({ name, value, callback: (given) => heard.push([name, given]) });
        said.push(extension.getNodeMenuItems({ comfyClass: "KSampler" }));
        const [{ content, submenu }] = extension.getNodeMenuItems(node);
        const preset = submenu.options[2];
        preset.callback();
        said.push([content, preset.content]);
        said.push(node.widgets.map((widget) => widget.value), heard);
    """
    settings = source("settings.js")
    other, titles, values, heard = play("presets.js", scene, settings)
    assert other == [] and titles == ["Presets", "Fastest steps (minutes of compiling)"]
    assert values == ["max-autotune", 0, "a.*", "in background", ""]
    assert heard == [["mode", "max-autotune"], ["cache_limit", 0], ["compile_when", "in background"]]
    for value, expected in (("before first image", "before first image"), ("planted by a foreign page", "in background")):
        chosen = f'app.extensionManager.setting = {{ get: (id) => id.endsWith("CompileWhen") ? "{value}" : null }};'
        assert play("presets.js", chosen + scene, settings)[2][3] == expected, "the user's setting for new nodes"
        node = '{ comfyClass: "TorchCompileKitModel", widgets: [{ name: "compile_when" }] }'
        created = f"{chosen} const node = {node}; extension.nodeCreated(node); said.push(node.widgets[0].value);"
        assert play("settings.js", created, "") == [expected]


def test_presets_are_settings_of_the_node_and_in_its_help(engine):
    (found,) = play("presets.js", "said.push(presets());", source("settings.js"))
    assert len(found) == len(dict(found)) == 5
    help_page = (JS / "docs" / "TorchCompileKitModel.md").read_text(encoding="utf-8")
    for title, sets in found:
        engine("settings").CompileSettings(**sets)
        assert f"- **{title}**: {', '.join(f'{name} `{value}`' for name, value in sets.items())}" in help_page


PANEL = """
    const COLORS = {}, waits = [], asked = [];
    const setTimeout = (go) => waits.push(go);
    let sure = false;
    app.extensionManager.registerSidebarTab = (tab) => { app.tab = tab; };
    app.extensionManager.dialog = { confirm: async ({ message }) => (said.push(message), sure) };
    document.createElement = () => ({ style: {}, isConnected: true, append() {}, replaceChildren() {}, querySelector() {} });
    api.fetchApi = async () => ({ json: async () => ({ en: { torchCompileKit: words } }) });
"""


GERMAN = """
    const speaks = async (german) => {
      const others = api.fetchApi, all = { en: { torchCompileKit: words }, de: { torchCompileKit: german } };
      api.fetchApi = async (path) => (path === "/i18n" ? { json: async () => all } : others(path));
      const change = new Event("Comfy.Locale.change");
      change.detail = { value: "de" };
      app.ui.settings.dispatchEvent(change);
      await settled();
    };
"""


def test_another_language_is_seen_at_once_where_nothing_was_told_and_in_what_stands_beside_a_report():
    scene = """
        const [empty, offered] = ["3", "4"].map((id) => created(id, "TorchCompileKitWarmup"));
        offered.onExecuted({ text: ["two graphs"] });
        await settled();
        offer(offered, "8x8");
        said.push(text(offered));
        api.fetchApi = async () => ({ ok: false });
        await speaks({ statusHere: "Hier.", add: "Hinzu: %1" });
        said.push(text(empty), text(offered));
    """
    told = play("node_report.js", GERMAN + scene)
    assert told == ["two graphsAdd 8x8 to extra_sizes", "Hier.", "two graphsHinzu: 8x8"]


def test_another_language_is_seen_in_warnings():
    scene = """
        warmup.connect(0, sampler, 0), prompt.connect(0, warmup, 1), negative.connect(0, warmup, 2);
        latent.connect(0, warmup, 3);
        send("graphChanged");
        said.push(warmup.torchCompileKitWarnings);
        await speaks({ differs: "%1: %2, dort %3 (%4)" });
        said.push(warmup.torchCompileKitWarnings);
    """
    assert play("from_sampler.js", GRAPH + KSAMPLER + GERMAN + scene) == [
        ["cfg is 1 here, 5 in KSampler."],
        ["cfg: 1, dort 5 (KSampler)"],
    ]


def test_another_language_is_seen_in_the_panel_though_nothing_has_changed():
    scene = """
        api.fetchApi = async () => ({ json: async () => ({ models: [], error: "no folder" }) });
        const drawn = [];
        document.createElement = () => ({
          style: {}, isConnected: true, querySelector() {}, append() {},
          replaceChildren(...parts) { drawn.push(parts.map((part) => part.textContent)); },
        });
        app.tab.render({ replaceChildren() {} });
        await settled();
        await refresh();
        said.push(drawn.length);
        await speaks({ noModel: "Keine Modelle." });
        said.push(drawn.length, drawn.at(-1).includes("Keine Modelle."));
        app.tab.destroy();
    """
    assert play("panel.js", GERMAN + scene, PANEL) == [1, 2, True]


def test_the_panel_shows_a_model_that_has_run_before_it_is_compiled():
    scene = """
        globalThis.colorOf = () => "grey";
        const none = { graphs: 0, being_compiled: [], failures: [], sizes: [], limits: [] };
        const model = { ...none, name: "SDXL", runs: 1, seconds_gained: 3 };
        const cache = { error: "no folder" };
        const unused = { ...model, name: "Flux", runs: 0, seconds_gained: null };
        api.fetchApi = async () => ({ json: async () => ({ models: [model, unused], ...cache }) });
        const drawn = [];
        const everything = (part) => [part.textContent ?? part, ...(part.parts ?? []).map(everything)].join("|");
        document.createElement = () => ({
          style: {}, isConnected: true, parts: [], querySelector() {}, append(...parts) { this.parts.push(...parts); },
          replaceChildren(...parts) { drawn.push(parts.map(everything).join("|")); },
        });
        app.tab.render({ replaceChildren() {} });
        await settled();
        said.push(["SDXL", "Flux", "nothing compiled yet", "Nothing has been"].map((part) => drawn.at(-1).includes(part)));
        app.tab.destroy();
    """
    assert play("panel.js", scene, PANEL) == [[True, False, True, False]]


def test_the_panel_goes_on_when_a_file_was_chosen():
    """While the list has the focus nothing is drawn."""
    scene = """
        const made = [];
        document.createElement = () => (made.push({ style: {}, append() {} }), made.at(-1));
        cacheOnDisk({ limit: 1, bytes: 0, folder: "", files: ["mine.tckcache"] });
        const files = made.find((one) => one.onchange);
        files.blur = () => said.push("goes on");
        files.onchange();
    """
    assert play("panel.js", scene, PANEL) == ["goes on"]


def test_the_panel_asks_again_when_it_has_been_answered():
    scene = """
        let answer;
        api.fetchApi = (path) => (asked.push(path), new Promise((resolve) => { answer = resolve; }));
        app.tab.render({ replaceChildren() {} });
        await settled();
        said.push(asked.length, waits.length);
        api.fetchApi = async () => { throw new Error("gone"); };
        answer({ json: async () => ({ error: "no cache folder" }) });
        app.tab.destroy();
    """
    assert play("panel.js", scene, PANEL) == [2, 0]


def test_a_button_whose_request_failed_can_be_pressed_again():
    scene = """
        const failing = button("clear", async () => { throw new Error("Failed to fetch"); });
        await failing.onclick();
        said.push(failing.disabled, told);
    """
    assert play("panel.js", scene, PANEL) == [False, "Failed to fetch"]


def test_code_is_loaded_from_a_file_only_when_the_user_is_sure():
    scene = """
        api.fetchApi = async (path, sent) => (asked.push([path, sent.body]), { json: async () => ({ error: "damaged" }) });
        said.push(await loadFile("mine.tckcache") ?? "nothing", asked.length);
        sure = true;
        said.push(await loadFile("mine.tckcache"), asked);
    """
    message, *said = play("panel.js", scene, PANEL)
    assert "code" in message and "runs on this machine" in message and "trust" in message
    asked = [["/torch-compile-kit/cache/load", '{"file":"mine.tckcache"}']]
    assert said == ["nothing", 0, message, "damaged", asked]


def test_a_file_for_another_machine_says_what_to_do_with_it():
    scene = """
        app.extensionManager.dialog.prompt = async () => "mine";
        let scrolled = 0;
        const where = { scrollIntoView: () => (scrolled += 1) };
        element = { querySelector: (what) => (what === ".told" ? where : null), replaceChildren() {} };
        api.fetchApi = async () => ({ json: async () => ({ text: "mine.tckcache, 2 MiB", models: [], error: "no folder" }) });
        await button("save", save).onclick();
        const written = told;
        api.fetchApi = async () => ({ json: async () => ({ error: "not a name" }) });
        said.push(written, scrolled, await save());
    """
    written, scrolled, refused = play("panel.js", scene, PANEL)
    what, cure = written.split("\n\n")
    assert (what, scrolled, refused) == ("mine.tckcache, 2 MiB", 1, "not a name")
    assert "same GPU and PyTorch" in cure and "copy the file" in cure and "Load" in cure


def test_a_benchmark_begins_with_its_result_in_a_node_that_is_wide_enough():
    scene = """
        const node = created("3", "TorchCompileKitBenchmark");
        said.push(node.size[0]);
        node.onExecuted({ text: ["1.34x as fast\\nFlux\\n  a  b"] });
        await settled();
        said.push(text(node));
    """
    assert play("node_report.js", scene) == [520, "1.34x as fast|Flux\n  a  b"]
