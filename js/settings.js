// The pack's own page in ComfyUI's settings; names and tooltips are in locales/LANGUAGE/settings.json.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

const GROUP = ["Torch Compile Kit", "Torch Compile Kit"];
const LIMIT = "TorchCompileKit.CacheGiB"; // engine/host/model/user_folder.py
const COMPILE = "TorchCompileKit.CompileWhen";
const NOTICES = "TorchCompileKit.Notices";
const CHOICES = ["in background", "before first image"];

const valueOf = (id) => app.extensionManager?.setting?.get(id);
// Pages of other sites can write ComfyUI's settings: with a value that is none, every prompt of a new node would be refused.
export const compileWhen = () => CHOICES.find((choice) => choice === valueOf(COMPILE)) ?? CHOICES[0];
export const showsNotices = () => valueOf(NOTICES) !== false;

function limitCache(gib, before) {
  if (before === undefined || gib === before) return; // the page has loaded: the server has read it by itself
  api.fetchApi("/torch-compile-kit/cache/limit", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ gib }),
  });
}

app.registerExtension({
  name: "torch-compile-kit.settings",

  settings: [
    {
      id: NOTICES,
      category: [...GROUP, "Notices"],
      name: "Notify me when an image had to wait for compiling",
      type: "boolean",
      defaultValue: true,
    },
    {
      id: COMPILE,
      category: [...GROUP, "Compile"],
      name: "New Torch Compile nodes compile",
      type: "combo",
      options: CHOICES,
      defaultValue: CHOICES[0],
    },
    {
      id: LIMIT,
      category: [...GROUP, "Cache"],
      name: "Size limit of the cache on disk, in GiB",
      tooltip: "The least recently used is deleted first. The environment variable TORCH_COMPILE_KIT_CACHE_GIB overrides this.",
      type: "number",
      attrs: { min: 0, max: 1024, step: 1 },
      defaultValue: 2,
      onChange: limitCache,
    },
  ],

  // Of a workflow that is loaded the values come afterwards.
  nodeCreated(node) {
    if (node.comfyClass !== "TorchCompileKitModel") return;
    const widget = node.widgets?.find((found) => found.name === "compile_when");
    if (widget) widget.value = compileWhen();
  },
});
