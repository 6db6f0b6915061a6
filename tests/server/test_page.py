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
const listeners = {}, toasts = [], said = [];
let extension;
const api = { addEventListener: (name, listener) => (listeners[name] ??= []).push(listener) };
const send = (name, detail) => (listeners[name] ?? []).forEach((listener) => listener({ detail }));
const toast = { add: (t) => toasts.push(t), remove: (t) => toasts.splice(toasts.indexOf(t), 1) };
const nodes = {};
const app = {
  registerExtension: (given) => { extension = given; },
  extensionManager: { toast },
  graph: { getNodeById: (id) => nodes[id] },
};
const document = { createElement: () => ({ style: {} }) };
const requestAnimationFrame = () => {};
const created = (id, comfyClass) => {
  const node = nodes[id] = { comfyClass, widgets: [], size: [200, 100] };
  node.addDOMWidget = (name, type, element) => (node.widgets.push({ name, element }), node.widgets.at(-1));
  extension.nodeCreated(node);
  return node;
};
const text = (node) => node.widgets[0]?.element.textContent;
"""


def play(script, scene):
    """What a scene tells with `said.push`, after the script's extension has been set up."""
    source = re.sub(r"^import .*$", "", (JS / script).read_text(), flags=re.MULTILINE)
    code = f"{STAGE}\n{source}\nextension.setup?.();\n{scene}\nconsole.log(JSON.stringify(said));"
    done = subprocess.run(["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_notice_goes_when_the_next_run_starts():
    scene = """
        send("torch-compile-kit.compiled", { model: "Flux", text: "a new size" });
        said.push(toasts.map((t) => t.detail));
        send("execution_start", {});
        said.push(toasts.length);
        send("execution_start", {});
    """
    assert play("compile_notice.js", scene) == [["a new size"], 0]


@pytest.mark.parametrize(
    "event, expected", [("execution_interrupted", "Cancelled"), ("execution_error", "Stopped by an error")]
)
def test_an_old_report_does_not_stay_over_a_run_that_gave_none(event, expected):
    scene = f"""
        const node = created("3", "TorchCompileKitWarmup"), other = created("4", "TorchCompileKitBenchmark");
        for (const n of [node, other]) n.onExecuted({{ text: ["two graphs"] }});
        send("execution_start", {{}});
        send("executing", "3");
        said.push(text(node));
        send("{event}", {{}});
        said.push(text(node), text(other));
    """
    running, after, other = play("node_report.js", scene)
    assert running == "Running." and after.startswith(expected) and other == "two graphs"


def test_a_report_that_came_is_kept_when_a_later_node_is_cancelled():
    scene = """
        const node = created("3", "TorchCompileKitWarmup");
        created("9", "KSampler");
        send("execution_start", {});
        send("executing", "3");
        node.onExecuted({ text: ["two graphs"] });
        send("executing", "9");
        send("executing", null);
        send("execution_interrupted", {});
        said.push(text(node));
    """
    assert play("node_report.js", scene) == ["two graphs"]


def test_the_model_node_says_how_it_goes():
    """Also inside a subgraph, and after the page was loaded anew."""
    scene = """
        const inner = created("3", "TorchCompileKitModel");
        nodes["3"] = undefined;
        nodes["7"] = { subgraph: { getNodeById: (id) => (id === "3" ? inner : undefined) } };
        const outer = created("5", "TorchCompileKitModel");
        said.push(text(inner));
        send("executing", "5");
        send("torch-compile-kit.status", { node: "7:3", state: "compiling", text: "compiling Block, 2 s; images go on" });
        said.push(text(inner), text(outer));
        api.fetchApi = async () => ({ ok: true, json: async () => ({ 5: { state: "ready", text: "ready" }, 99: {} }) });
        await extension.afterConfigureGraph();
        said.push(text(outer));
    """
    placeholder = "How it goes appears here when the model runs."
    assert play("node_report.js", scene) == [placeholder, "compiling Block, 2 s; images go on", placeholder, "ready"]


def test_advanced_inputs_are_hidden_in_the_classic_renderer_until_they_are_asked_for():
    scene = """
        Object.assign(app, { canvas: { setDirty: () => {} } });
        const made = (names) => ({
          comfyClass: "TorchCompileKitModel", size: [200, 300], setSize: () => {}, computeSize: () => [200, 100],
          widgets: names.map((name) => ({ name, options: { advanced: name !== "mode" } })),
        });
        const node = made(["mode", "backend"]);
        extension.nodeCreated(node);
        said.push(node.widgets.map((widget) => widget.advanced ?? false), node.showAdvanced ?? false);
        const [entry] = node.getExtraMenuOptions(null, []);
        entry.callback();
        said.push(entry.content, node.showAdvanced, node.getExtraMenuOptions(null, [{ content: "Hide Advanced" }]).length);
        const linked = made(["mode", "backend"]);
        extension.nodeCreated(linked);
        linked.inputs = [{ widget: { name: "backend" }, link: 4 }];
        extension.loadedGraphNode(linked);
        said.push(linked.showAdvanced);
    """
    assert play("advanced_inputs.js", scene) == [[False, True], False, "Show Advanced", True, 0, True]
