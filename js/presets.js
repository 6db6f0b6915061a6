// Settings for a purpose, in the menu of Torch Compile.
import { app } from "/scripts/app.js";
import { compileWhen } from "./settings.js";
import { say } from "./words.js";

const MODEL = "TorchCompileKitModel";
const KEPT = ["only_blocks", "attention", "allow_tf32", "cudnn_benchmark"]; // no preset has a view on them
// Titles and the inputs that they set; the others become what a new node has. js/docs/TorchCompileKitModel.md lists them.
export const presets = () => [
  [say("presetAutomatic"), {}],
  [say("presetReady"), { compile_when: "before first image" }],
  [say("presetFastest"), { mode: "max-autotune" }],
  [say("presetLowVram"), { mode: "default" }],
  [say("presetFind"), { mode: "default", compile_when: "before first image", backend: "aot_eager", on_failure: "stop" }],
];

export function apply(node, sets) {
  const options = Object.values(node.constructor.nodeData?.input ?? {}).reduce((all, some) => ({ ...all, ...some }), {});
  for (const widget of node.widgets ?? []) {
    const fresh = widget.name === "compile_when" ? compileWhen() : options[widget.name]?.[1]?.default;
    if (fresh === undefined || KEPT.includes(widget.name)) continue;
    widget.value = sets[widget.name] ?? fresh;
    widget.callback?.(widget.value);
  }
  app.canvas?.setDirty(true, true);
}

app.registerExtension({
  name: "torch-compile-kit.presets",

  getNodeMenuItems(node) {
    if (node.comfyClass !== MODEL) return [];
    const options = presets().map(([content, sets]) => ({ content, callback: () => apply(node, sets) }));
    return [{ content: say("presets"), has_submenu: true, submenu: { options } }];
  },
});
