// Settings for a purpose, in the menu of Torch Compile Model; they are in presets.json.
import { app } from "/scripts/app.js";
import { say } from "./words.js";

const MODEL = "TorchCompileKitModel";
const OURS = "Torch Compile Kit"; // named without their group
const KEPT = ["only_blocks", "attention", "allow_tf32", "cudnn_benchmark"]; // no preset has a view on them
let groups = {};

// What the node has when it is new, but for what the preset sets.
export function apply(node, sets) {
  const options = Object.values(node.constructor.nodeData?.input ?? {}).reduce((all, some) => ({ ...all, ...some }), {});
  for (const widget of node.widgets ?? []) {
    const fresh = options[widget.name]?.[1]?.default;
    if (fresh === undefined || KEPT.includes(widget.name)) continue;
    widget.value = sets[widget.name] ?? fresh;
    widget.callback?.(widget.value);
  }
  app.canvas?.setDirty(true, true);
}

const title = ({ name, sets }) => {
  const values = Object.entries(sets).map(([input, value]) => `${input} ${value}`);
  return values.length ? `${name} (${values.join(", ")})` : name;
};

app.registerExtension({
  name: "torch-compile-kit.presets",

  async setup() {
    groups = await (await fetch(new URL("./presets.json", import.meta.url))).json();
  },

  getNodeMenuItems(node) {
    if (node.comfyClass !== MODEL) return [];
    // An entry for each: Nodes 2.0 shows no menu in a submenu, and a long one beyond the window.
    return Object.entries(groups).map(([group, presets]) => ({
      content: group === OURS ? say("presets") : `${say("presets")}: ${group}`,
      has_submenu: true,
      submenu: { options: presets.map((preset) => ({ content: title(preset), callback: () => apply(node, preset.sets) })) },
    }));
  },
});
