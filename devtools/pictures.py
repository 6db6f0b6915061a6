"""Take the pictures of README and docs/ in ComfyUI's own page: a real server, on which the demo's tiny Flux draws.

    COMFYUI_PATH=COMFYUI python -m devtools.pictures --base /opt/ComfyUI

1. Each picture is of a page on which something has just run: what its texts say is what was measured.
2. `take` refuses a page that holds a test's name, a path of temporary files, an error or a verdict that is none (REFUSED).
3. The animation shows what happened in its order; a caption says when, so that leaving out time is no lie.
4. No speed is gained on a CPU, so `use` and the animation's end show the line of a run on a GPU, sent to the page as the server
   sends it (benchmarks/results/ready.json); the caption says whose.

Needs Playwright, Chromium and Pillow. The base directory must not exist: its name is in the picture of the tab.
"""

import argparse
import io
import re
import shutil
import tempfile
import time
from pathlib import Path

from . import inprocess, prompts
from .demo import tiny_job
from .server import Server

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFUSED = {
    "the name of a test": r"\btest_\w+|\[(classic|nodes 2\.0)\]",
    "a temporary path": rf"{re.escape(tempfile.gettempdir())}\b|/tmp/|AppData.Local.Temp",
    "no verdict": r"Too noisy|No clear difference",
    "an error": r"\bTraceback\b|Errors?\b|\b[Ff]ailed\b|\bmissing\b",
}
# All that somebody can read in the page: its elements, and the nodes that a canvas draws.
TEXTS = """() => [
    document.title, document.body.innerText,
    ...[...document.querySelectorAll("input, textarea")].map((field) => field.value),
    ...(window.app?.graph?._nodes ?? []).flatMap((node) => [
        node.title, node.has_errors ? "Error" : "", ...(node.widgets ?? []).map((widget) => widget.value)]),
].join("\\n")"""
# At most ten frames a second: without a GPU each is drawn by the CPU, which the model needs.
FEW_FRAMES = """
    const soon = window.requestAnimationFrame.bind(window);
    window.requestAnimationFrame = (draw) => setTimeout(() => soon(draw), 100);
    window.cancelAnimationFrame = (id) => clearTimeout(id);
"""
HELPERS = """
    window.kit = {
      node: (name) => app.graph._nodes.find((node) => node.comfyClass === "TorchCompileKit" + name || node.comfyClass === name),
      text: (name) => kit.node(name).widgets.find((found) => found.name === "torch_compile_kit_report").element.textContent,
      color: (name) => kit.node(name).widgets.find((found) => found.name === "torch_compile_kit_report").element.style.color,
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
BAR = 40  # of them below the animation, for its caption
MARGIN = 24
CORNER = 90, 150  # of the window, where the first node is
# Where nodes are that are not in the picture: their links come from above, between the others.
ABOVE = {"LighthousePrompt": [430, -260], "VAEDecode": [80, -260], "VAELoader": [-300, -260], "EmptyLatentImage": [390, -420]}
THREE = {"UNETLoader": [0, 0, 290, 90], "TorchCompileKitModel": [340, 0, 340, 130], "KSampler": [750, 0, 280, 262]}
# What the nodes held in the run of benchmarks/results/ready.json.
FLUX = "flux1-dev.safetensors"
RECORDED = (
    *(("UNETLoader", "unet_name", FLUX), ("KSampler", "steps", 20)),
    *(("EmptyLatentImage", "width", 1024), ("EmptyLatentImage", "height", 1024)),
)
# Of the animation: what is said meanwhile, and for how many seconds it is shown; at most 10 in all.
PHASES = {
    "before": ("Torch Compile between model and sampler. Press Run.", 1.2),
    "first": ("It compiles in the background.", 1.2),
    "compiling": ("Images keep coming meanwhile.", 2.2),
    "compiled": ("Compiled.", 0.8),
    "compiled, at rest": ("Compiled.", 0.6),
    "another size": ("Another size: nothing is compiled again.", 0.8),
    "another size, at rest": ("Another size: nothing is compiled again.", 0.6),
    "back": ("Compiled once, for all sizes.", 0.3),
    "back, at rest": ("Compiled once, for all sizes.", 0.5),
    "on a GPU": ("", 1.8),  # the caption is `Story.where`
}
MOST = 10  # pictures of a phase


class RefusedError(Exception):
    """The page holds what no picture may show."""


def check(window):
    """Raise RefusedError where the page of a Playwright window holds what no picture may show."""
    text = window.evaluate(TEXTS)
    for what, pattern in REFUSED.items():
        if found := re.search(pattern, text):
            line = next(line for line in text.splitlines() if re.search(pattern, line))
            raise RefusedError(f"the page holds {what}, {found[0]!r}: {line.strip()[:120]}")


def take(window, clip=None):
    """A picture of the page, or of this part of it, as PNG."""
    check(window)
    return window.screenshot(clip=clip)


class Story:
    """The page of a server with the lighthouse in it, and what is pressed there.

    recorded: the line of a run on a GPU; where: on which.
    frames: (phase, picture, when) of the animation.
    """

    def __init__(self, browser, server, job, recorded, where):
        self.server, self.job, self.recorded, self.where, self.frames = server, job, recorded, where, []
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

    def until(self, condition, seconds=90):
        self.window.wait_for_function(condition, polling=100, timeout=1000 * seconds)

    def node(self, kind, **inputs):
        """A node as it is put into a graph."""
        return {"class_type": kind, "inputs": {**prompts.widgets(self.info[kind]), **inputs}}

    def prompt(self):
        """The demo's, with our node, and with a node that shows the picture."""
        ours = prompts.MODEL_NODE
        prompt = self.job.prompt((ours, prompts.widgets(self.info[ours])), 1, False)
        return {**prompt, "save": {"class_type": "PreviewImage", "inputs": prompt["save"]["inputs"]}}

    def load(self, prompt):
        self.js("(prompt) => app.loadApiJson(prompt, 'lighthouse')", prompt)
        self.until(f"() => app.graph._nodes.length === {len(prompt)}")

    def place(self, places, scale=1.0, **above):
        """Show nodes at these places ((x, y) or (x, y, width, height)), with links from others that are above; their clip."""
        width, height = self.js(
            """([places, hidden, scale, corner]) => {
                let right = -Infinity, bottom = -Infinity;
                for (const node of app.graph._nodes) {
                    const place = places[node.comfyClass];
                    node.pos = (place ?? hidden[node.comfyClass] ?? [0, -1200]).slice(0, 2);
                    if (place?.length === 4) node.setSize(place.slice(2));
                    if (!place) continue;
                    right = Math.max(right, node.pos[0] + node.size[0]);
                    bottom = Math.max(bottom, node.pos[1] + node.size[1]);
                }
                const { left, top } = app.canvas.canvas.getBoundingClientRect();
                Object.assign(app.canvas.ds, { scale, offset: [(corner[0] - left) / scale, (corner[1] - top) / scale + 30] });
                app.canvas.deselectAll?.();
                app.canvas.setDirty(true, true);
                return [right * scale, (bottom + 30) * scale];
            }""",
            [places, {**ABOVE, **above}, scale, CORNER],
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

    def press_run(self):
        ended = self.js("() => kit.ended")
        self.window.get_by_role("button", name="Run", exact=True).first.click()
        self.window.mouse.move(5, 1095)
        return lambda: self.js("() => kit.ended") > ended

    def run(self):
        over = self.press_run()
        while not over():
            time.sleep(0.2)
        time.sleep(1)

    def line(self):
        """What the node says."""
        return self.js("() => kit.text('Model')")

    def show_recorded(self):
        """The nodes as of the run on a GPU, with its line."""
        for node, widget, value in RECORDED:
            self.set(node, widget, value)
        line = """(line) => comfyAPI.api.api.dispatchCustomEvent("torch-compile-kit.status",
            { workflow: app.rootGraph.id, node: String(kit.node("Model").id), ...line })"""
        self.js(line, self.recorded)

    def being_compiled(self):
        return any(model["being_compiled"] for model in self.server.get("/torch-compile-kit/report")["models"])

    # -- the pictures

    def record(self, clip, phase, until, every=1.0):
        """Add a picture of a phase each time that something has changed, until `until()`."""
        while True:
            over = until()
            picture = take(self.window, clip)
            if not self.frames or (phase, picture) != self.frames[-1][:2]:
                self.frames.append((phase, picture, time.monotonic()))
            if over:
                return
            time.sleep(every)

    def animate(self):
        """Run until all is compiled, and go on, also at another size."""
        self.load(self.prompt())
        clip = self.place(
            {
                "UNETLoader": [0, 0, 290, 90],
                "EmptyLatentImage": [0, 140, 290, 110],
                "TorchCompileKitModel": [340, 0, 340, 130],
                "PreviewImage": [340, 180, 340, 370],
                "KSampler": [750, 0, 280, 262],
            }
        )
        self.record(clip, "before", lambda: True)
        self.record(clip, "first", self.press_run(), 2.0)
        while self.being_compiled():
            self.record(clip, "compiling", self.press_run(), 2.5)
        for _ in range(2):
            self.record(clip, "compiled", self.press_run())
        time.sleep(1)
        self.record(clip, "compiled, at rest", lambda: True)
        self.set("EmptyLatentImage", "width", self.job.other_size[0])
        self.record(clip, "another size", self.press_run())
        time.sleep(1)
        self.record(clip, "another size, at rest", lambda: True)
        self.set("EmptyLatentImage", "width", self.job.size[0])
        self.record(clip, "back", self.press_run())
        time.sleep(1)
        self.record(clip, "back, at rest", lambda: True)
        self.show_recorded()
        self.place({**THREE, "EmptyLatentImage": [0, 140, 290, 110]})
        self.record(clip, "on a GPU", lambda: True)

    def use(self):
        """The three nodes, large; after `animate`."""
        self.show_recorded()
        return take(self.window, self.place(THREE, VAEDecode=[1100, -260]))

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
        picture = take(self.window, box)
        self.window.get_by_role("button", name="Torch Compile Kit:").first.click()
        return picture


def animation(frames, where):
    """The frames as pictures with their captions, and the milliseconds that each is shown; where: of the recorded line."""
    from PIL import Image, ImageDraw, ImageFont

    began, pictures, durations = frames[0][2], [], []
    for phase, (words, seconds) in PHASES.items():
        of_phase = [frame for frame in frames if frame[0] == phase]
        step = max(1, len(of_phase) // MOST)
        chosen = of_phase[::step]
        for _, png, at in chosen:
            picture = Image.open(io.BytesIO(png)).convert("RGB")
            picture = picture.resize((picture.width // SHARP, picture.height // SHARP), Image.Resampling.LANCZOS)
            whole = Image.new("RGB", (picture.width, picture.height + BAR), "#0b0b0b")
            whole.paste(picture, (0, 0))
            pen, middle = ImageDraw.Draw(whole), picture.height + BAR / 2
            pen.text(
                (MARGIN, middle),
                words or f"Measured: {where}",
                "#ffffff",
                ImageFont.load_default(19 if words else 15),
                anchor="lm",
            )
            clock = f"{at - began:.0f} s" if words else ""
            pen.text((picture.width - MARGIN, middle), clock, "#a0a0a0", ImageFont.load_default(19), anchor="rm")
            pictures.append(whole)
            durations.append(round(1000 * seconds / len(chosen)))
    return pictures, durations


def save_animation(frames, file, where):
    pictures, durations = animation(frames, where)
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=90, method=6)


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
            story = Story(browser, server, job, session_tables.recorded_line(), session_tables.recorded_where())
            for name in ("animate", "use", "panel"):
                try:
                    picture = getattr(story, name)()
                except (RefusedError, TimeoutError) as error:
                    print(f"{name}: {error}")
                    continue
                print(name, story.line(), flush=True)
                if picture:
                    (options.out / f"{name}.png").write_bytes(picture)
                else:
                    save_animation(story.frames, options.out / "use.webp", story.where)
    finally:
        shutil.rmtree(options.base)


if __name__ == "__main__":
    main()
