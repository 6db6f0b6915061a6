// Tells the user when a run had to wait for compiling, and what would have avoided that.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
import { isOpen, nodeOf } from "./graph.js";
import { offer } from "./node_report.js";
import { ifRunningIsOpen, runningWorkflow } from "./running.js";
import { showsNotices } from "./settings.js";

const isWarmup = (node) => node?.comfyClass === "TorchCompileKitWarmup";
const shown = new Map(); // one for a model, with the warmups behind the node that compiles it

// A button in these warmups that adds the size, unless they have it.
function offerTo(warmups, size) {
  for (const node of warmups.map(nodeOf).filter(isWarmup)) {
    const sizes = node.widgets.find((widget) => widget.name === "extra_sizes").value;
    if (!sizes.split("\n").includes(size)) offer(node, size);
  }
}

app.registerExtension({
  name: "torch-compile-kit.compile-notice",

  setup() {
    const { toast } = app.extensionManager;

    api.addEventListener("torch-compile-kit.compiled", ({ detail: { model, text, size, workflow, warmups } }) => {
      const notice = { severity: "info", summary: `Torch Compile Kit: ${model}`, detail: text, life: 10_000 };
      if (shown.has(model)) toast.remove(shown.get(model).notice);
      shown.set(model, { notice, size, workflow, warmups });
      if (showsNotices()) toast.add(notice);
      if (size && isOpen(workflow)) offerTo(warmups, size);
    });
    // What did not run, since nothing in front of it has changed, is reported as executed too.
    let cached = [];
    api.addEventListener("execution_cached", ({ detail }) => { cached = detail.nodes; });
    api.addEventListener("executed", async ({ detail }) => {
      if (cached.includes(detail.node)) return;
      const ran = await runningWorkflow();
      for (const [model, { notice, workflow, warmups }] of shown) {
        if ((ran ?? workflow) !== workflow || !warmups.includes(detail.node)) continue;
        toast.remove(notice);
        shown.delete(model);
      }
      ifRunningIsOpen(() => isWarmup(nodeOf(detail.node)) && offer(nodeOf(detail.node), undefined));
    });
  },

  // Another tab, undo and redo make all nodes anew.
  afterConfigureGraph() {
    for (const { size, workflow, warmups } of shown.values()) if (size && isOpen(workflow)) offerTo(warmups, size);
  },
});
