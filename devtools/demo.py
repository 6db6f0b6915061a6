"""The main job on a real server: the shipped workflow without and with our nodes, side by side."""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from . import inprocess, prompts
from .server import ROOT, PromptRejectedError, Server, ServerError, error_of, outputs_of

SIZE = 512
STEPS = 8
SEEDS = (1, 2)
# Relative, over all steps. On a GPU the host runs the tiny Flux in half precision, where every rounding shows.
TOLERANCE = {False: 1e-3, True: 5e-2}


class DemoError(Exception):
    """The demo ran and showed something that must not be."""


@dataclass
class Run:
    """What one way of running the workflow left: a latent and an image for each seed, and the times of its steps."""

    latents: list = field(default_factory=list)
    images: list = field(default_factory=list)
    step_seconds: list = field(default_factory=list)

    @property
    def seconds_per_step(self):
        # The fastest, for whatever else runs on the machine can only slow a step down.
        return min(self.step_seconds)


def say(text):
    print(text, flush=True)


def queue(server, prompt):
    entry = server.queue(prompt)
    if error := error_of(entry):
        raise DemoError(f"node {error['node_id']} ({error['node_type']}): {error['exception_message'].strip()}")
    return entry


def sample(server, prompt, name):
    """Run the prompt once for each seed. A step's time is that between two progress events, so the first has none."""
    run = Run()
    sampler = prompts.find(prompt, "KSampler")
    with server.progress() as events:
        for seed in SEEDS:
            entry = queue(server, prompts.with_latent(prompts.change(prompt, "KSampler", seed=seed), name))
            run.latents += outputs_of(entry, "latents")
            run.images += outputs_of(entry, "images")
        time.sleep(0.5)
    steps = [event for event in events if event[1] == sampler]
    run.step_seconds = [b[0] - a[0] for a, b in pairwise(steps) if b[2] == a[2] + 1]
    if not run.step_seconds:
        raise DemoError("the server sent no progress of the sampler")
    return run


def largest_difference(output, ours, theirs):
    """(largest absolute, largest relative) difference over the pairs of saved latents."""
    import safetensors.torch

    pairs = [
        [safetensors.torch.load_file(output / name)["latent_tensor"].float() for name in pair]
        for pair in zip(ours, theirs, strict=True)
    ]
    return (max(float((a - b).abs().max()) for a, b in pairs), max(float((a - b).norm() / b.norm()) for a, b in pairs))


def total(report, key):
    return sum(model[key] for model in report["models"])


def table(rows):
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        say(f"  {label:<{width}}  {value}")


def compare(server):
    shipped = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), SIZE, SIZE, STEPS)
    say(f"{prompts.SHIPPED.relative_to(ROOT)} with tiny models, {SIZE}x{SIZE}, {STEPS} steps, seeds {SEEDS}")
    say("1/3 without Torch Compile Kit")
    eager = sample(server, prompts.without_kit(shipped), "eager")
    say("2/3 Torch Compile and Torch Compile Warmup")
    queue(server, prompts.only_warmup(shipped))
    warm = server.get("/torch-compile-kit/report")
    say("3/3 the same images, compiled")
    compiled = sample(server, shipped, "compiled")
    return eager, compiled, warm, server.get("/torch-compile-kit/report")


def judge(eager, compiled, warm, after, output, gpu):
    """Print the table; return what is wrong with it."""
    absolute, relative = largest_difference(output, compiled.latents, eager.latents)
    added = total(after, "graphs") - total(warm, "graphs")
    classes = ", ".join(f"{c['blocks']} {c['class']}" for model in after["models"] for c in model["classes"])
    say("")
    table(
        [
            ("blocks compiled", f"{total(warm, 'blocks')} ({classes})"),
            ("graphs", total(warm, "graphs")),
            ("graph breaks", total(after, "graph_breaks")),
            ("compile seconds", f"{total(warm, 'compile_seconds'):.1f}"),
            ("seconds per step, eager", f"{eager.seconds_per_step:.3f}"),
            (
                "seconds per step, compiled",
                f"{compiled.seconds_per_step:.3f} ({eager.seconds_per_step / compiled.seconds_per_step:.2f}x)",
            ),
            ("graphs added while sampling", added),
            ("largest latent difference", f"{absolute:.2g} ({relative:.2g} relative, {TOLERANCE[gpu]:g} allowed)"),
        ]
    )
    say("  (seconds per step: the shortest time between two progress events of the sampler)\n")
    problems = [f"{f['block']}: {f['message']}" for model in after["models"] for f in model["failures"]]
    if not total(warm, "graphs"):
        problems.append("nothing was compiled")
    if added:
        problems.append(f"{added} graphs were compiled while sampling, after the warmup")
    if not relative <= TOLERANCE[gpu]:
        problems.append("the compiled latents differ from the eager ones by more than is allowed")
    return problems


def main(folder):
    """Run the demo; its images end up in `folder`. Returns an exit code."""
    folder, gpu = Path(folder), inprocess.has_gpu()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-demo-", ignore_cleanup_errors=True) as base:
        try:
            say(f"writing tiny models, starting ComfyUI on the {'GPU' if gpu else 'CPU'}")
            inprocess.enter_host(base)
            inprocess.write_models(base, ["flux", "clip_l", "flux_vae"])
            # An inductor cache of its own, so that the compile seconds are those of a first run.
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(base) / "inductor")}
            with Server(inprocess.host_folder(), base, gpu, environment=cache) as server:
                runs = compare(server)
            output = Path(base) / "output"
            problems = judge(*runs, output, gpu)
            for name, run in zip(("eager", "compiled"), runs, strict=False):
                shutil.copy(output / run.images[0], folder / f"{name}.png")
            say(f"images: {folder / 'eager.png'}\n        {folder / 'compiled.png'}")
        except (DemoError, PromptRejectedError, ServerError, ValueError, OSError) as error:
            problems = [str(error)]
        if problems and (Path(base) / "server.log").exists():
            shutil.copy(Path(base) / "server.log", folder)
            problems.append(f"the server's log: {folder / 'server.log'}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
