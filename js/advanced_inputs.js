// Advanced inputs in the classic renderer, which takes no notice of the option: hidden until the node's menu shows them.
import { app } from "/scripts/app.js";
import { isOurs, nodesOf, rootGraph } from "./graph.js";
import { say } from "./words.js";

const advanced = (node) => (node.widgets ?? []).filter((widget) => widget.options?.advanced);
const isClassic = () => !globalThis.LiteGraph?.vueNodesMode; // Nodes 2.0 has a button for them

function arrange(node, fit) {
  for (const widget of advanced(node)) widget.hidden = isClassic() && !node.torchCompileKitShowsAll;
  if (fit) node.setSize([node.size[0], node.computeSize()[1]]);
  app.canvas?.setDirty(true, true);
}

// Nodes 2.0 hides them by itself, and ComfyUI leaves room for them all the same, also where a workflow is loaded.
function leaveNoRoom(node) {
  const compute = node.computeSize;
  node.computeSize = function () {
    const shown = isClassic() || this.showAdvanced ? [] : advanced(this).filter((widget) => !widget.hidden);
    for (const widget of shown) widget.hidden = true;
    const size = compute.apply(this, arguments);
    for (const widget of shown) widget.hidden = false;
    return size;
  };
}

app.registerExtension({
  name: "torch-compile-kit.advanced-inputs",

  setup() {
    // Nodes 2.0 makes nodes taller than the classic renderer needs them.
    const changed = () => setTimeout(() => { for (const node of nodesOf(rootGraph(), isOurs)) arrange(node, isClassic()); }, 100);
    app.ui?.settings?.addEventListener?.("Comfy.VueNodes.Enabled.change", changed);
  },

  nodeCreated(node) {
    if (!isOurs(node) || !advanced(node).length) return;
    leaveNoRoom(node);
    arrange(node, true);
    const menu = node.getExtraMenuOptions;
    node.getExtraMenuOptions = function () {
      const more = menu?.apply(this, arguments) ?? [];
      if (!isClassic()) return more;
      const content = this.torchCompileKitShowsAll ? say("hideAdvanced") : say("showAdvanced");
      return [{ content, callback: () => { this.torchCompileKitShowsAll = !this.torchCompileKitShowsAll; arrange(this, true); } }, ...more];
    };
  },

  // What is connected is seen.
  loadedGraphNode(node) {
    if (!isOurs(node)) return;
    const names = advanced(node).map((widget) => widget.name);
    node.torchCompileKitShowsAll = !!node.inputs?.some((input) => input.link != null && names.includes(input.widget?.name));
    arrange(node, false);
  },
});
