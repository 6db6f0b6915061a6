"""Show what the pack does: how long a user waits for an image with and without it, and that the image stays the same.

1. Load the model: a tiny Flux that draws a lighthouse (lighthouse.py).
2. Uncompiled, with our node, with core's node: the first image, the next one, another size. All on one real ComfyUI server.
3. Wait until our blocks are compiled; then the pictures for the comparison, at both sizes.
4. Print the waits as bars, save both pictures as one file, and check what must hold.

Core's node comes last, so that kernels which PyTorch then finds in its cache make core's node faster, not ours.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from . import inprocess, prompts
from .server import PromptRejectedError, Server, ServerError, error_of, outputs_of, wait_until

# Relative difference of latents. On a GPU ComfyUI samples in half precision, where every rounding shows; for another image
# the difference is about 1.
TOLERANCE_CPU, TOLERANCE_GPU = 1e-3, 5e-2
# Mean distance of the tiny Flux' latent from the scene, whose values go from -1 to 1.
NEAR_THE_SCENE = 0.05
COMPILE_TIMEOUT = 900
BAR = 40
# Pixels between the two pictures, and below them.
GAP, CAPTION = 8, 32
UNCOMPILED, OURS, CORE = "uncompiled", "Torch Compile", "core's TorchCompileModel"
# The images that a user makes first: (words, seed, whether at the other size).
WAITS = (("first image", 1, False), ("next image", 2, False), ("another size", 1, True))
# The images that are compared, with other seeds than WAITS: ComfyUI would answer a repeated prompt from its cache.
COMPARED = (("main", 3, False), ("other", 2, True))


class DemoError(Exception):
    """A prompt of the demo failed, or its images cannot be timed."""


@dataclass
class Images:
    """The results of one way of running the model.

    seconds: from the start of a prompt to the saved image.
    latents, pictures: file names of the compared images.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    latents: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """The model and how it samples.

    loaders: a prompt's nodes that load files. outputs: links to their "model", "positive", "negative" and "vae".
    """

    loaders: dict
    outputs: dict
    size: tuple[int, int]
    other_size: tuple[int, int]
    steps: int

    def prompt(self, compiler, seed, other):
        """`compiler` is the node that compiles, without its model, or None."""
        width, height = self.other_size if other else self.size
        model, given = self.outputs["model"], {name: self.outputs[name] for name in ("positive", "negative")}
        nodes = dict(self.loaders)
        if compiler:
            class_type, inputs = compiler
            nodes["compile"] = {"class_type": class_type, "inputs": {"model": model, **inputs}}
            model = ["compile", 0]
        sampler = {
            "seed": seed,
            "steps": self.steps,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "denoise": 1.0,
        }
        latent = {"width": width, "height": height, "batch_size": 1}
        nodes["latent"] = {"class_type": "EmptyLatentImage", "inputs": latent}
        nodes["sampler"] = {
            "class_type": "KSampler",
            "inputs": {"model": model, **given, "latent_image": ["latent", 0], **sampler},
        }
        nodes["decode"] = {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": self.outputs["vae"]}}
        nodes["save"] = {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "image"}}
        return nodes


def tiny_job(base):
    """Write the lighthouse's files for ComfyUI's loaders; returns the job that draws it."""
    from . import lighthouse

    lighthouse.write(Path(base) / "models")
    (Path(base) / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("demo_nodes.py"), Path(base) / "custom_nodes")
    loaders = {
        "model": {"class_type": "UNETLoader", "inputs": {"unet_name": lighthouse.WEIGHTS.name, "weight_dtype": "default"}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": lighthouse.VAE}},
        "prompt": {"class_type": "LighthousePrompt", "inputs": {"tokens": lighthouse.TOKENS}},
    }
    outputs = {"model": ["model", 0], "positive": ["prompt", 0], "negative": ["prompt", 0], "vae": ["vae", 0]}
    size, narrow = (lighthouse.WIDTH, lighthouse.HEIGHT), (lighthouse.NARROW, lighthouse.HEIGHT)
    return Job(loaders, outputs, size, narrow, steps=8)


def say(text=""):
    print(text, flush=True)


def queue(server, prompt):
    """Run a prompt; returns its history entry, and the seconds that ComfyUI took."""
    entry = server.queue(prompt)
    if error := error_of(entry):
        raise DemoError(f"node {error['node_id']} ({error['node_type']}): {error['exception_message'].strip()}")
    times = {kind: data["timestamp"] for kind, data in entry["status"]["messages"] if "timestamp" in data}
    return entry, (times["execution_success"] - times["execution_start"]) / 1000


def wait(server, job, compiler, images):
    """Make the first images, as a user who has just added the node, and note their seconds."""
    for words, seed, other in WAITS:
        _, images.seconds[words] = queue(server, job.prompt(compiler, seed, other))
        say(f"    {words:<14}{images.seconds[words]:6.1f} s")


def make_compared(server, job, compiler, images):
    """Make the images that are compared. A step's time is the shortest between two progress events, since
    other work on the machine can only slow a step down.
    """
    with server.progress() as events:
        for _, seed, other in COMPARED:
            prompt = prompts.with_latent(job.prompt(compiler, seed, other), "compared")
            entry, _ = queue(server, prompt)
            images.latents += outputs_of(entry, "latents")
            images.pictures += outputs_of(entry, "images")
            if not other:
                time.sleep(0.3)
                at_main_size = len(events)
    steps = [event for event in events[:at_main_size] if event[1] == "sampler"]
    # ComfyUI leaves out progress of fast steps.
    between = [(b[0] - a[0]) / (b[2] - a[2]) for a, b in pairwise(steps) if b[2] > a[2]]
    if not between:
        raise DemoError("the server sent no progress of the sampler")
    images.step_seconds = min(between)


def wait_until_compiled(server):
    """Seconds until the blocks are compiled."""
    began = time.monotonic()
    wait_until(lambda: not any(model["being_compiled"] for model in report(server)), "blocks are compiled", COMPILE_TIMEOUT)
    return time.monotonic() - began


def report(server):
    return server.get("/torch-compile-kit/report")["models"]


def total(models, key):
    return sum(model[key] for model in models)


def run(server, job):
    """({way: Images}, report when all was compiled, report after the compared images)."""
    info = server.get("/object_info")
    node = prompts.MODEL_NODE
    ways = {UNCOMPILED: None, OURS: (node, prompts.widgets(info[node]))}
    ways[CORE] = ("TorchCompileModel", {"backend": "inductor"})
    made = {way: Images() for way in ways}
    say("  loading the model")
    queue(server, job.prompt(None, 0, False))

    say(f"  {UNCOMPILED}")
    wait(server, job, None, made[UNCOMPILED])
    make_compared(server, job, None, made[UNCOMPILED])

    say(f"  {OURS}")
    wait(server, job, ways[OURS], made[OURS])
    seconds = wait_until_compiled(server)
    say(f"    compiled in the background, {seconds:.0f} s after the third image")
    compiled = report(server)
    make_compared(server, job, ways[OURS], made[OURS])
    after = report(server)

    say(f"  {CORE}")
    try:
        wait(server, job, ways[CORE], made[CORE])
    except DemoError as error:
        say(f"    failed: {str(error).splitlines()[0]}")
    return made, compiled, after


def bars(made):
    """The waits, as lines of text."""
    longest = max(max(images.seconds.values(), default=0) for images in made.values())
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for words, *_ in WAITS:
        yield f"  {words}"
        for way, images in made.items():
            seconds = images.seconds.get(words)
            bar = block * max(1, round(BAR * seconds / longest)) if seconds else "failed"
            yield f"    {way:<25}{bar}" + (f" {seconds:.1f} s" if seconds else "")


def latent_difference(output, ours, theirs):
    """Largest (relative) difference over the pairs of saved latents."""
    pairs = [[load_latent(output / name) for name in pair] for pair in zip(ours, theirs, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def load_latent(file):
    import safetensors.torch

    return safetensors.torch.load_file(file)["latent_tensor"].float()


def side_by_side(output, made, file, gpu):
    """Save the first compared picture, uncompiled and compiled, as one; their largest difference in steps of 255."""
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    pictures = [Image.open(output / made[way].pictures[0]).convert("RGB") for way in (UNCOMPILED, OURS)]
    left, right = (numpy.asarray(picture).astype(int) for picture in pictures)
    difference = abs(left - right)
    width, height = pictures[0].size
    both = Image.new("RGB", (2 * width + GAP, height + CAPTION), "white")
    draw, font = ImageDraw.Draw(both), ImageFont.load_default(18)
    captions = [UNCOMPILED, f"{OURS}: differs by at most {difference.max()} of 255"]
    for number, (way, picture) in enumerate(zip((UNCOMPILED, OURS), pictures, strict=True)):
        left_edge = number * (width + GAP)
        both.paste(picture, (left_edge, 0))
        timed = f", {made[way].step_seconds:.3f} s a step" if gpu else ""
        draw.text((left_edge + 8, height + 6), captions[number] + timed, fill="black", font=font)
    both.save(file)
    return int(difference.max()), float((difference > 0).mean())


def checks(made, compiled, after, output, gpu):
    """(what must hold, whether it does, what was found)."""
    relative = latent_difference(output, made[OURS].latents, made[UNCOMPILED].latents)
    graphs, added = total(compiled, "graphs"), total(after, "graphs") - total(compiled, "graphs")
    breaks, failures = total(after, "graph_breaks"), [f for model in after for f in model["failures"]]
    classes = ", ".join(f"{c['blocks']} {c['class']}" for model in after for c in model["classes"])
    yield "blocks are compiled", graphs > 0, f"{total(after, 'blocks')} ({classes}), {graphs} graphs"
    yield "no block failed", not failures, "; ".join(f"{f['block']}: {f['message']}" for f in failures)
    yield "no graph breaks", not breaks, breaks
    yield "nothing is compiled again, at either size", not added, added
    allowed = TOLERANCE_GPU if gpu else TOLERANCE_CPU
    yield "same latents", relative <= allowed, f"relative difference {relative:.1g}, {allowed:g} allowed"


def check_scene(latents):
    from . import lighthouse

    distance = max(lighthouse.distance_from_scene(load_latent(latent)) for latent in latents)
    return "the picture is the lighthouse", distance < NEAR_THE_SCENE, f"mean distance {distance:.3f}"


def show(made, compiled, after, output, folder, gpu):
    """Print the results; returns the checks that failed."""
    say("\nThe wait, from the start of a prompt to the saved image:\n")
    for line in bars(made):
        say(line)
    before, now = made[UNCOMPILED].step_seconds, made[OURS].step_seconds
    if gpu:
        say(f"\nA step: {before:.3f} s uncompiled, {now:.3f} s compiled, {before / now:.2f} times as fast.")
    else:
        say("\nOn a CPU no speed is to be gained, and while blocks compile in the background, images share its cores with the")
        say("compiler. This shows how long one waits, and that nothing breaks.")
    file = folder / "uncompiled-and-compiled.png"
    largest, share = side_by_side(output, made, file, gpu)
    say(f"\nThe picture, uncompiled and compiled: {file}")
    say(f"  their largest difference is {largest} of 255, in {share:.3%} of the values\n")
    failed = []
    scene = check_scene([output / name for name in made[OURS].latents])
    for what, holds, found in (*checks(made, compiled, after, output, gpu), scene):
        say(f"  {'ok' if holds else 'FAILED':<7}{what}{f': {found}' if found != '' else ''}")
        failed += [] if holds else [what]
    return failed


def main(folder):
    """Run the demo; its picture ends up in `folder`. Returns an exit code."""
    folder, gpu, began = Path(folder), inprocess.has_gpu(), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-demo-", ignore_cleanup_errors=True) as base:
        try:
            inprocess.enter_host(base)
            job = tiny_job(base)
            sizes = f"{job.size[0]}x{job.size[1]}, then {job.other_size[0]}x{job.other_size[1]}"
            say(f"a tiny Flux that has learned one picture, {sizes}, {job.steps} steps")
            say(f"  starting ComfyUI on the {'GPU' if gpu else 'CPU'}")
            # An inductor cache of its own, so that waits are those of a first run.
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(base) / "inductor")}
            with Server(inprocess.host_folder(), base, gpu, environment=cache) as server:
                made, compiled, after = run(server, job)
            problems = show(made, compiled, after, Path(base) / "output", folder, gpu)
        except (DemoError, PromptRejectedError, ServerError, ValueError, OSError) as error:
            problems = [str(error)]
        if problems and (Path(base) / "server.log").exists():
            shutil.copy(Path(base) / "server.log", folder)
            problems.append(f"the server's log: {folder / 'server.log'}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if problems:
        return 1
    say(f"\nAll checks passed, in {time.monotonic() - began:.0f} s.")
    return 0
