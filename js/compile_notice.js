// Tells the user when a run had to wait for compiling, and what would have avoided that.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
import { isOpen, nodeOf, nodesOf, rootGraph } from "./graph.js";
import { offer } from "./node_report.js";
import { showsNotices } from "./settings.js";

const isWarmup = (node) => node?.comfyClass === "TorchCompileKitWarmup";

app.registerExtension({
  name: "torch-compile-kit.compile-notice",

  setup() {
    const shown = new Map(); // one for a model
    const { toast } = app.extensionManager;

    api.addEventListener("torch-compile-kit.compiled", ({ detail: { model, text, size, workflow } }) => {
      const notice = { severity: "info", summary: `Torch Compile Kit: ${model}`, detail: text, life: 10_000 };
      if (shown.has(model)) toast.remove(shown.get(model));
      shown.set(model, notice);
      if (showsNotices()) toast.add(notice);
      if (size && isOpen(workflow)) for (const node of nodesOf(rootGraph(), isWarmup)) offer(node, size);
    });
    // What did not run, since nothing in front of it has changed, is reported as executed too.
    let cached = [];
    api.addEventListener("execution_cached", ({ detail }) => { cached = detail.nodes; });
    api.addEventListener("executed", ({ detail }) => {
      const node = nodeOf(detail.node);
      if (!isWarmup(node) || cached.includes(detail.node)) return;
      for (const notice of shown.values()) toast.remove(notice);
      shown.clear();
      offer(node, undefined);
    });
  },
});
