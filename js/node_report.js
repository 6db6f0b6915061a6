// Shows the text that a node of ours reports in the node, in both renderers.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

const WIDGET = "torch_compile_kit_report";
// Node id: what stands there before the first run.
const PLACEHOLDERS = {
  TorchCompileKitWarmup: "The report appears here after the warmup.",
  TorchCompileKitBenchmark: "The figures appear here after the benchmark.",
  TorchCompileKitSaveCache: "Where the file is appears here.",
  TorchCompileKitLoadCache: "What was loaded appears here.",
};

const TALLEST = 400; // pixels of text; more is scrolled

function reportWidget(node) {
  const known = node.widgets?.find((widget) => widget.name === WIDGET);
  if (known) return known;
  const text = document.createElement("pre");
  text.style.cssText = "margin:0; padding:6px; overflow:auto; white-space:pre-wrap; font-size:11px; user-select:text;";
  text.textContent = PLACEHOLDERS[node.comfyClass];
  return node.addDOMWidget(WIDGET, "torch-compile-kit.report", text, {
    serialize: false,
    getMinHeight: () => node.torchCompileKitTextHeight ?? (node.comfyClass.endsWith("Cache") ? 60 : 110),
    getValue: () => text.textContent,
    setValue: (value) => { text.textContent = value; },
  });
}

// A text that is new and does not fit makes its node taller.
function show(node, text) {
  const widget = reportWidget(node);
  const { element } = widget;
  if (element.textContent === text) return;
  element.textContent = text;
  delete node.torchCompileKitTextHeight;
  requestAnimationFrame(() => {
    if (!element.clientHeight || element.scrollHeight <= element.clientHeight) return;
    node.torchCompileKitTextHeight = Math.min(element.scrollHeight, TALLEST) + 2 * (widget.margin ?? 10);
    node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
  });
}

// Nodes that have begun and not reported yet.
const running = new Set();

function begin(node) {
  if (!(node?.comfyClass in PLACEHOLDERS)) return;
  running.add(node);
  show(node, "Running.");
}

function stop(text) {
  for (const node of running) show(node, text);
  running.clear();
}

app.registerExtension({
  name: "torch-compile-kit.node-report",

  setup() {
    api.addEventListener("executing", ({ detail }) => begin(detail && (app.rootGraph ?? app.graph)?.getNodeById(detail)));
    api.addEventListener("execution_start", () => running.clear());
    api.addEventListener("execution_interrupted", () => stop("Cancelled: no report."));
    api.addEventListener("execution_error", () => stop("Stopped by an error: no report."));
  },

  nodeCreated(node) {
    if (!(node.comfyClass in PLACEHOLDERS)) return;
    reportWidget(node).serialize = false;
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      running.delete(this);
      if (output?.text) show(this, output.text.join("\n"));
    };
  },
});
