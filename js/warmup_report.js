// Shows the report of a node in the node, in both renderers.
import { app } from "/scripts/app.js";

const BEFORE = {
  TorchCompileKitWarmup: "The report appears here after the warmup.",
  TorchCompileKitSaveCache: "Where the file is appears here.",
  TorchCompileKitLoadCache: "What was loaded appears here.",
};
const WIDGET = "torch_compile_kit_report";

function reportWidget(node) {
  const known = node.widgets?.find((widget) => widget.name === WIDGET);
  if (known) return known;
  const text = document.createElement("pre");
  text.style.cssText = "margin:0; padding:6px; overflow:auto; white-space:pre-wrap; font-size:11px; user-select:text;";
  text.textContent = BEFORE[node.comfyClass];
  return node.addDOMWidget(WIDGET, "torch-compile-kit.report", text, {
    serialize: false,
    getMinHeight: () => (node.comfyClass === "TorchCompileKitWarmup" ? 110 : 60),
    getValue: () => text.textContent,
    setValue: (value) => { text.textContent = value; },
  });
}

app.registerExtension({
  name: "torch-compile-kit.warmup-report",

  nodeCreated(node) {
    if (!(node.comfyClass in BEFORE)) return;
    reportWidget(node).serialize = false;
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (output?.text) reportWidget(this).element.textContent = output.text.join("\n");
    };
  },
});
