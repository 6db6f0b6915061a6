"""Take the pictures `use` and `panel` of docs/ in ComfyUI's own page: a real server, on which the demo's tiny Flux draws.

    COMFYUI_PATH=COMFYUI python -m devtools.pictures --base /opt/ComfyUI

No speed is gained on a CPU, so `use` shows the status line of a run on a GPU, sent to the page as the server sends it
(benchmarks/results/ready.json); the caption names the GPU. Look at both pictures before you commit them: no picture may show a
path of temporary files or an error. docs/use.webp, the animation, was made by this file at f53a9b8.

Needs Playwright and Chromium. The base directory must not exist: its name is in the picture of the tab.
"""

import argparse
import shutil
import time
from pathlib import Path

from . import inprocess, prompts
from .demo import tiny_job
from .server import Server

DOCS = Path(__file__).resolve().parent.parent / "docs"
# At most ten frames a second: without a GPU the CPU draws each frame, and the model needs the CPU.
FEW_FRAMES = """
    const soon = window.requestAnimationFrame.bind(window);
    window.requestAnimationFrame = (draw) => setTimeout(() => soon(draw), 100);
    window.cancelAnimationFrame = (id) => clearTimeout(id);
"""
HELPERS = """
    window.kit = {
      node: (name) => app.graph._nodes.find((node) => node.comfyClass === "TorchCompileKit" + name || node.comfyClass === name),
      ended: 0,
    };
    const { api } = window.comfyAPI.api;
    for (const end of ["success", "error", "interrupted"]) api.addEventListener("execution_" + end, () => (kit.ended += 1));
"""
SETTINGS = {
    "TutorialCompleted": True,
    "Locale": "en",
    "Minimap.Visible": False,
    "Graph.CanvasMenu": False,
    "Graph.CanvasInfo": False,
    "NodeBadge.NodeSourceBadgeMode": "None",
    "VueNodes.Enabled": False,
    "Workflow.ShowMissingModelsWarning": False,
}
SHARP = 2  # pixels of a picture for each of the page
MARGIN = 24
CORNER = 90, 150  # of the window, where the first node is
# Positions of nodes outside the picture: their links enter it from above, between the visible nodes.
ABOVE = {"LighthousePrompt": [430, -260], "VAEDecode": [80, -260], "VAELoader": [-300, -260], "EmptyLatentImage": [390, -420]}
THREE = {"UNETLoader": [0, 0, 290, 90], "TorchCompileKitModel": [340, 0, 340, 130], "KSampler": [750, 0, 280, 262]}
# Values of widgets in the run of benchmarks/results/ready.json.
FLUX = "flux1-dev.safetensors"
RECORDED = (
    *(("UNETLoader", "unet_name", FLUX), ("KSampler", "steps", 20)),
    *(("EmptyLatentImage", "width", 1024), ("EmptyLatentImage", "height", 1024)),
)


class Story:
    """Drive the page of a server that has the lighthouse; `recorded`: the status line of a run on a GPU."""

    def __init__(self, browser, server, job, recorded):
        self.server, self.job, self.recorded = server, job, recorded
        self.info = server.get("/object_info")
        context = browser.new_context(
            viewport={"width": 1400, "height": 1100}, device_scale_factor=SHARP, reduced_motion="reduce", color_scheme="dark"
        )
        context.add_init_script(FEW_FRAMES)
        self.window = context.new_page()
        self.window.set_default_timeout(90_000)
        for name, value in SETTINGS.items():
            server.post(f"/settings/Comfy.{name}", value)
        self.window.goto(server.url, wait_until="domcontentloaded")
        self.until("() => window.app?.graph && app.canvas && app.extensionManager?.workflow.activeWorkflow")
        self.until("() => !app.extensionManager.spinner")
        self.js(HELPERS)

    def js(self, expression, given=None):
        return self.window.evaluate(expression, given)

    def until(self, condition):
        self.window.wait_for_function(condition, polling=100)

    def prompt(self):
        """The demo's prompt, with our node, and with a node that shows the picture."""
        ours = prompts.MODEL_NODE
        prompt = self.job.prompt((ours, prompts.widgets(self.info[ours])), 1, False)
        return {**prompt, "save": {"class_type": "PreviewImage", "inputs": prompt["save"]["inputs"]}}

    def load(self, prompt):
        self.js("(prompt) => app.loadApiJson(prompt, 'lighthouse')", prompt)
        self.until(f"() => app.graph._nodes.length === {len(prompt)}")

    def place(self, places, **above):
        """Show the nodes of `places` at (x, y, width, height), move others out of the picture; returns the picture's clip."""
        width, height = self.js(
            """([places, hidden, corner]) => {
                let right = -Infinity, bottom = -Infinity;
                for (const node of app.graph._nodes) {
                    const place = places[node.comfyClass];
                    node.pos = (place ?? hidden[node.comfyClass] ?? [0, -1200]).slice(0, 2);
                    if (!place) continue;
                    node.setSize(place.slice(2));
                    right = Math.max(right, node.pos[0] + node.size[0]);
                    bottom = Math.max(bottom, node.pos[1] + node.size[1]);
                }
                const { left, top } = app.canvas.canvas.getBoundingClientRect();
                Object.assign(app.canvas.ds, { scale: 1, offset: [corner[0] - left, corner[1] - top + 30] });
                app.canvas.deselectAll?.();
                app.canvas.setDirty(true, true);
                return [right, bottom + 30];
            }""",
            [places, {**ABOVE, **above}, CORNER],
        )
        time.sleep(1.5)
        left, top = CORNER
        return {"x": left - MARGIN, "y": top - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}

    def set(self, node, widget, value):
        self.js(
            """([node, widget, value]) => {
                const found = kit.node(node).widgets.find((w) => w.name === widget);
                found.value = value;
                found.callback?.(value);
            }""",
            [node, widget, value],
        )

    def run(self):
        ended = self.js("() => kit.ended")
        self.window.get_by_role("button", name="Run", exact=True).first.click()
        self.window.mouse.move(5, 1095)
        self.until(f"() => kit.ended > {ended}")
        time.sleep(1)

    def show_recorded(self):
        """Set the nodes' widgets and the status line to those of the run on a GPU."""
        for node, widget, value in RECORDED:
            self.set(node, widget, value)
        line = """(line) => comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status",
            { workflow: app.rootGraph.id, node: String(kit.node("Model").id), ...line })"""
        self.js(line, self.recorded)

    def being_compiled(self):
        return any(model["being_compiled"] for model in self.server.get("/torch-compile-kit/report")["models"])

    def use(self):
        """Take the picture of the three nodes once all blocks are compiled."""
        self.load(self.prompt())
        self.run()
        while self.being_compiled():
            time.sleep(0.5)
        self.run()
        self.show_recorded()
        return self.window.screenshot(clip=self.place(THREE, VAEDecode=[1100, -260]))

    def panel(self):
        self.window.get_by_role("button", name="Torch Compile Kit:").first.click()
        found = self.window.locator(".torch-compile-kit")
        found.get_by_text("ready").first.wait_for()
        self.window.mouse.move(900, 1095)
        time.sleep(3)
        box = found.evaluate("""(panel) => {
            const { left, top, width } = panel.getBoundingClientRect();
            return { x: left, y: top, width, height: panel.lastElementChild.getBoundingClientRect().bottom - top + 16 };
        }""")
        return self.window.screenshot(clip=box)


def main():
    from playwright.sync_api import sync_playwright

    from benchmarks import session_tables

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a folder that is made, and deleted in the end")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    options.base.mkdir(parents=True)
    try:
        inprocess.enter_host(options.base)
        gpu, job = inprocess.has_gpu(), tiny_job(options.base)
        models = options.base / "models" / "diffusion_models"
        shutil.copy(next(models.iterdir()), models / FLUX)  # a name to choose; it is not loaded
        # One thread for the model, so that it does not wait for the compiler's cores.
        environment = {"OMP_NUM_THREADS": "1"}
        with (
            sync_playwright() as started,
            Server(inprocess.host_folder(), options.base, gpu, environment=environment) as server,
        ):
            chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            story = Story(browser, server, job, session_tables.recorded_line())
            for name in ("use", "panel"):
                (options.out / f"{name}.png").write_bytes(getattr(story, name)())
    finally:
        shutil.rmtree(options.base)


if __name__ == "__main__":
    main()
