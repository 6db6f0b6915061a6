// Advanced inputs in the classic renderer, which takes no notice of the option: hidden until the node's menu shows them.
import { app } from "/scripts/app.js";

const ours = (node) => node.comfyClass?.startsWith("TorchCompileKit");
const advanced = (node) => (node.widgets ?? []).filter((widget) => widget.options?.advanced);

app.registerExtension({
  name: "torch-compile-kit.advanced-inputs",

  nodeCreated(node) {
    if (!ours(node) || !advanced(node).length) return;
    for (const widget of advanced(node)) widget.advanced = true;
    const menu = node.getExtraMenuOptions;
    node.getExtraMenuOptions = function (canvas, options) {
      const more = menu?.apply(this, arguments) ?? [];
      const said = (option) => /advanced/i.test(option?.content ?? "");
      if ([...(options ?? []), ...more].some(said)) return more; // the page has an entry of its own
      return [{ content: this.showAdvanced ? "Hide Advanced" : "Show Advanced", callback: () => toggle(this) }, ...more];
    };
  },

  // What is connected is seen.
  loadedGraphNode(node) {
    if (!ours(node)) return;
    const names = advanced(node).map((widget) => widget.name);
    if (node.inputs?.some((input) => input.link != null && names.includes(input.widget?.name))) node.showAdvanced = true;
  },
});

function toggle(node) {
  node.showAdvanced = !node.showAdvanced;
  node.setSize([node.size[0], node.computeSize()[1]]);
  app.canvas.setDirty(true, true);
}
