// Tells the user when a run had to compile something, and what would have avoided it.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

app.registerExtension({
  name: "torch-compile-kit.compile-notice",

  setup() {
    api.addEventListener("torch-compile-kit.compiled", ({ detail }) => {
      app.extensionManager.toast.add({
        severity: "warn",
        summary: `Torch Compile Kit: ${detail.model}`,
        detail: detail.text,
        life: 15000,
      });
    });
  },
});
