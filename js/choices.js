// Choices of ours that are phrases, in the page's language; workflows keep their values.
import { app } from "/scripts/app.js";
import { say } from "./words.js";

const PHRASES = ["in background", "before first image", "uncompiled linears", "run uncompiled", "stop"];

const label = (value) =>
  ({
    "in background": say("inBackground"),
    "before first image": say("beforeFirstImage"),
    "uncompiled linears": say("uncompiledLinears"),
    "run uncompiled": say("runUncompiled"),
    stop: say("stop"),
  })[value] ?? value ?? "";

app.registerExtension({
  name: "torch-compile-kit.choices",

  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("TorchCompileKit")) return;
    for (const { options } of node.widgets ?? []) {
      if (Array.isArray(options?.values) && options.values.some((value) => PHRASES.includes(value))) options.getOptionLabel = label;
    }
  },
});
