// The pack's own page in ComfyUI's settings; names and tooltips are in locales/LANGUAGE/settings.json.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

const GROUP = ["Torch Compile Kit", "Torch Compile Kit"];
const LIMIT = "TorchCompileKit.CacheGiB"; // engine/host/model/user_folder.py
const COMPILE = "TorchCompileKit.CompileWhen";
const NOTICES = "TorchCompileKit.Notices";
const BACKGROUND = "in background";

const valueOf = (id) => app.extensionManager?.setting?.get(id);
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
      options: [BACKGROUND, "before first image"],
      defaultValue: BACKGROUND,
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
    {
      id: "TorchCompileKit.SharedCache", // engine/host/model/user_folder.py
      category: [...GROUP, "SharedCache"],
      name: "Cache shared with other machines: redis://host:6379/0, or a folder",
      tooltip:
        "Compiled once, on every machine. It needs a key, see docs/fleet.md. " +
        "The environment variable TORCH_COMPILE_KIT_SHARED_CACHE overrides this; it counts from the next start.",
      type: "text",
      defaultValue: "",
    },
  ],

  // Of a workflow that is loaded the values come afterwards.
  nodeCreated(node) {
    if (node.comfyClass !== "TorchCompileKitModel") return;
    const widget = node.widgets?.find((found) => found.name === "compile_when");
    if (widget) widget.value = valueOf(COMPILE) ?? BACKGROUND;
  },
});
