// Shows the text that a node of ours reports in the node, in both renderers.
import { app } from "/scripts/app.js";

const WIDGET = "torch_compile_kit_report";
// Node id: what stands there before the first run.
const PLACEHOLDERS = {
  TorchCompileKitWarmup: "The report appears here after the warmup.",
  TorchCompileKitBenchmark: "The figures appear here after the benchmark.",
  TorchCompileKitSaveCache: "Where the file is appears here.",
  TorchCompileKitLoadCache: "What was loaded appears here.",
};

function reportWidget(node) {
  const known = node.widgets?.find((widget) => widget.name === WIDGET);
  if (known) return known;
  const text = document.createElement("pre");
  text.style.cssText = "margin:0; padding:6px; overflow:auto; white-space:pre-wrap; font-size:11px; user-select:text;";
  text.textContent = PLACEHOLDERS[node.comfyClass];
  return node.addDOMWidget(WIDGET, "torch-compile-kit.report", text, {
    serialize: false,
    getMinHeight: () => (node.comfyClass.endsWith("Cache") ? 60 : 110),
    getValue: () => text.textContent,
    setValue: (value) => { text.textContent = value; },
  });
}

app.registerExtension({
  name: "torch-compile-kit.node-report",

  nodeCreated(node) {
    if (!(node.comfyClass in PLACEHOLDERS)) return;
    reportWidget(node).serialize = false;
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (output?.text) reportWidget(this).element.textContent = output.text.join("\n");
    };
  },
});
