// Choices of ours that are phrases, in the page's language; workflows keep their values.
import { app } from "/scripts/app.js";
import { isOurs } from "./graph.js";
import { say } from "./words.js";

const PHRASES = {
  "in background": () => say("inBackground"),
  "before first image": () => say("beforeFirstImage"),
  "uncompiled linears": () => say("uncompiledLinears"),
  "run uncompiled": () => say("runUncompiled"),
  stop: () => say("stop"),
};
const label = (value) => PHRASES[value]?.() ?? value ?? "";

app.registerExtension({
  name: "torch-compile-kit.choices",

  nodeCreated(node) {
    if (!isOurs(node)) return;
    for (const { options } of node.widgets ?? []) {
      if (Array.isArray(options?.values) && options.values.some((value) => value in PHRASES)) options.getOptionLabel = label;
    }
  },
});
