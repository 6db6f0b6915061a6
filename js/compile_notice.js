// Tells the user when a run had to compile something, and what would have avoided it; gone when the next run starts.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

app.registerExtension({
  name: "torch-compile-kit.compile-notice",

  setup() {
    const shown = [];
    api.addEventListener("torch-compile-kit.compiled", ({ detail }) => {
      const notice = {
        severity: "warn",
        summary: `Torch Compile Kit: ${detail.model}`,
        detail: detail.text,
        life: 15000,
      };
      shown.push(notice);
      app.extensionManager.toast.add(notice);
    });
    api.addEventListener("execution_start", () => {
      for (const notice of shown.splice(0)) app.extensionManager.toast.remove(notice);
    });
  },
});
