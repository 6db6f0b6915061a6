"""Many prompts in one server, states of the models in turn: every latent and image against eager's, and what the server keeps.

    python -m benchmarks.soak --host COMFYUI --tiny --out FILE    # 200 prompts on the CPU
    python -m benchmarks.soak --host COMFYUI --gpu --out FILE     # 100 prompts on a GPU

Eager's prompts come first, each state once, in the same server; states of the same size share their seed, so an
image of the wrong LoRA, patch or size would be seen: how far eager's own are apart stands beside the errors. `compile` is in
the background and at once in turn. On a GPU the server has default flags (cudaMallocAsync, dynamic VRAM); the first half has
all memory, where CUDA graphs are captured, the second `--free` GiB, where weights are streamed, in a server of its own.

Ends with 1 where something is wrong. What counts as flat, after the first two rounds (in the first the host loads and compiles
in the background, in the second all waits for its code):
- memory of the server's process (RSS): the last round's largest is at most 5 % above the second's; glibc keeps freed memory in
  arenas for each thread, and which thread allocates is another each time.
- open files, threads: the last round's least is no more than the second's least plus 2 (idle connections of the page).
- memory of the GPU in use: the last round's largest is at most 0.5 GiB above the second's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from devtools.prompts import KIT
from devtools.server import PromptRejectedError, ServerError, error_of, outputs_of

from . import sessions

# Relative errors of latents: rounding gives less (2e-6 in fp32, 0.006 in fp16: results/soak.json).
WRONG = {"cpu": 1e-5, "gpu": 0.02}
# Mean difference of images, in 1/255: two latents that differ by rounding are decoded by the same code.
WRONG_IMAGE = {"cpu": 0.01, "gpu": 2.0}
# What may be added to a reading: a share (process' memory), a number (files, threads), GiB (GPU).
GROWTH, MORE, GIB = 1.05, 2, 0.5
STEPS = {"cpu": 2, "gpu": 6}
# A node that patches the model's blocks, and what it is given; the small models have two of each kind of block.
SKIP = ("SkipLayerGuidanceDiT", {"double_layers": "1", "single_layers": "1", "start_percent": 0.0, "end_percent": 1.0})
PATCHES = {"flux": SKIP, "wan": SKIP, "sdxl": ("PerturbedAttentionGuidance", {})}
SMALL_SIZES = {
    "flux_small": [(256, 256), (320, 192)],
    "sdxl_small": [(256, 256), (320, 192)],
    "wan_small": [(128, 128), (192, 96)],
}
OTHER_TOKENS = {"wan_small": 96}  # its session has one length only
# The random LoRA (models.py) are weak: at these strengths each image is far from the other, and from that without.
WEAK, STRONG = 4.0, 8.0
GPU_SIZES = [(1024, 1024), (1024, 768), (768, 1024)]


@dataclass(frozen=True)
class State:
    """What one prompt asks for.

    Args:
        size: width and height; prompts of the same size share their seed, so nothing but the state makes their images differ.
        lora: its strength, or none.
        patched: behind a node that patches blocks.
        other_text: of another length.
    """

    model: str
    size: tuple[int, int]
    lora: float | None = None
    patched: bool = False
    other_text: bool = False

    def name(self) -> str:
        width, height = self.size
        parts = [self.model, f"{width}x{height}", f"LoRA {self.lora}" if self.lora else ""]
        return ", ".join(filter(None, [*parts, "patched" if self.patched else "", "other text" if self.other_text else ""]))


def small_states() -> list[State]:
    """Each model's in a row, then the next model's."""
    found = []
    for model, (one, other) in SMALL_SIZES.items():
        found += [
            State(model, one),
            State(model, other),
            State(model, one, lora=WEAK),
            State(model, one, lora=STRONG),
            State(model, other, lora=STRONG),
            State(model, one, patched=True),
            State(model, other, lora=WEAK, patched=True),
            State(model, one, other_text=True),
        ]
    return found


def gpu_states(model: str) -> list[State]:
    """Sizes and LoRA; no patches, which rule CUDA graphs out."""
    return [State(model, size, lora) for lora in (None, WEAK, STRONG) for size in GPU_SIZES]


def prompt_of(state: State, info: dict, settings: dict | None, steps: int, tiled: bool) -> dict:
    """The prompt of a state, decoded in tiles or whole; without our nodes where `settings` is None. Saves latent and image."""
    asked = sessions.Prompt(state.name(), lora=state.lora, other_text=state.other_text)
    nodes = sessions.graph(state.model, asked, 0, "eager" if settings is None else "ours", info, settings or {})

    def add(node: str, class_type: str, **inputs) -> None:
        nodes[node] = {"class_type": class_type, "inputs": {**sessions.widgets(info[class_type]), **inputs}}

    width, height = state.size
    if state.other_text and state.model in OTHER_TOKENS:
        nodes["prompts"]["inputs"]["tokens"] = OTHER_TOKENS[state.model]
    nodes["latent"]["inputs"] |= {"width": width, "height": height}
    nodes["sampler"]["inputs"] |= {"steps": steps, "seed": width * 10_000 + height}
    if state.patched:
        # In front of our node without a LoRA, behind it with one: both orders are in use.
        before = "compile" if settings is not None and state.lora is None else "sampler"
        class_type, given = PATCHES[state.model.partition("_")[0]]
        add("patch", class_type, model=nodes[before]["inputs"]["model"], **given)
        nodes[before]["inputs"]["model"] = ["patch", 0]
    if tiled:
        add("decode", "VAEDecodeTiled", **nodes["decode"]["inputs"])
    add("save", "PreviewImage", images=["decode", 0])
    add("keep", "SaveLatent", samples=["sampler", 0], filename_prefix="soak")
    return nodes


class Soak:
    """The prompts of one server.

    Args:
        bench: clock, folder and rows.
        states: a round of them.
        tiled: decode in tiles, where memory is short: else the host does when it has run out of it, which changes images.
        variant: "ours", or "eager" for what the host alone keeps.
    """

    def __init__(self, bench: sessions.Bench, server, states: list, variant: str, tiled: bool = False):
        self.bench, self.server, self.states, self.variant, self.tiled = bench, server, states, variant, tiled
        self.where = "gpu" if bench.options.gpu else "cpu"
        self.info = server.get("/object_info")
        self.expected: dict = {}
        self.wrong: list[dict] = []
        self.errors: list[float] = []
        self.image_errors: list[float] = []
        self.kept: list[dict] = []
        self.seconds: list[float] = []

    def run(self, count: int, until: float) -> None:
        """Eager's, then so many prompts; none is begun after `until`, in seconds of time.monotonic."""
        began = time.perf_counter()
        for state in self.states:
            self.expected[state] = self._made(state, None)
        print(f"{len(self.states)} of eager in {time.perf_counter() - began:.0f} s", flush=True)
        for index in range(count):
            if time.monotonic() > until:
                print(f"stopped by --limit after {index} prompts", flush=True)
                return
            self._one(index)

    def _one(self, index: int) -> None:
        state, rounds = self.states[index % len(self.states)], index // len(self.states)
        settings = (
            {"compile_when": ("in background", "before first image")[(index + rounds) % 2]} if self.variant == "ours" else None
        )
        began = time.perf_counter()
        try:
            latent, images = self._made(state, settings)
        except RuntimeError as error:
            self.wrong.append({"index": index, "state": state.name(), "died": str(error)[:300]})
            print(index, state.name(), error, flush=True)
            return
        self.seconds.append(time.perf_counter() - began)
        error, image_error = difference(latent, self.expected[state][0]), image_difference(images, self.expected[state][1])
        self.errors.append(error)
        self.image_errors.append(image_error)
        nearest = self._nearest(state, latent)
        if not error <= WRONG[self.where] or not image_error <= WRONG_IMAGE[self.where] or nearest is not state:
            what = {"error": error, "image_error": image_error, "nearest": nearest.name()}
            self.wrong.append({"index": index, "state": state.name(), **what})
        self.kept.append(self._keeps())
        print(
            f"{index} {state.name()}, {settings['compile_when'] if settings else 'eager'}: {self.seconds[-1]:.2f} s, "
            f"error {error:.2g}, image {image_error:.2g}, {self.kept[-1]}",
            flush=True,
        )

    def _nearest(self, state, latent):
        """Which state of that size, by eager's latents, this one is nearest to."""
        same = [other for other in self.states if (other.model, other.size) == (state.model, state.size)]
        return min(same, key=lambda other: difference(latent, self.expected[other][0]))

    def _made(self, state, settings: dict | None):
        """The latent and the images of a prompt.

        Raises:
            RuntimeError: it ended with an error.
        """
        import safetensors.torch

        nodes = prompt_of(state, self.info, settings, STEPS[self.where], self.tiled)
        if any(node["class_type"].startswith(KIT) for node in nodes.values()) != (settings is not None):
            raise ValueError("a prompt with our nodes has no settings, or one without has")
        entry = self.server.queue(nodes, self.bench.options.prompt_limit)
        if (error := error_of(entry)) is not None:
            raise RuntimeError(f"{error['exception_type']}: {error['exception_message']}")
        (file,) = outputs_of(entry, "latents")
        latent = safetensors.torch.load_file(self.server.base / "output" / file)["latent_tensor"]
        (self.server.base / "output" / file).unlink()
        images = []
        for item in entry["outputs"]["save"]["images"]:
            path = self.server.base / item["type"] / item["subfolder"] / item["filename"]
            images.append(read_image(path))
            path.unlink()
        return latent, images

    def _keeps(self) -> dict:
        """What the server's process holds: MiB, open files, threads, GiB of the GPU, graphs compiled so far."""
        process = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        found = {"rss": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"])}
        found["files"] = len(list((process / "fd").iterdir()))
        found |= {name: round(gib, 2) for name, gib in self.server.get("/session/memory").items()}
        return {**found, "graphs": self.server.get("/session/steps").get("graphs", 0)}

    def row(self, **more) -> dict:
        """What came out."""
        size = len(self.states)
        rounds = [self.kept[at : at + size] for at in range(0, len(self.kept), size)]
        if len(rounds) > 1 and len(rounds[-1]) < size:  # a part of a round has not seen all states
            rounds[-2:] = [[*rounds[-2], *rounds[-1]]]
        least, names_of_two = self._apart()
        row = {
            "kind": "soak",
            "variant": self.variant,
            "prompts": len(self.seconds),
            "states": [state.name() for state in self.states],
            "rounds": len(rounds),
            "wrong": self.wrong,
            "allowed_error": WRONG[self.where],
            "largest_error": float(f"{max(self.errors, default=0):.3g}"),
            "allowed_image_error": WRONG_IMAGE[self.where],
            "largest_image_error": float(f"{max(self.image_errors, default=0):.3g}"),
            "least_difference_of_two_states": float(f"{least:.3g}"),
            "these_two": names_of_two,
            "median_seconds": round(sorted(self.seconds)[len(self.seconds) // 2], 2) if self.seconds else None,
            **more,
        }
        names = [name for name in (rounds[0][0] if rounds else {}) if name != "graphs"]
        for name in names:
            pick = min if name in ("files", "threads") else max
            row[f"{name}_by_round"] = [pick(kept[name] for kept in one) for one in rounds]
        row["graphs_by_round"] = [max(kept["graphs"] for kept in one) for one in rounds]
        row["not_flat"] = [name for name in names if name != "allocated" and not flat(name, row[f"{name}_by_round"])]
        return row

    def _apart(self) -> tuple[float, list[str]]:
        """How far eager's latents of two states with the same shape and seed are from each other, at the least; and which."""
        found = [
            (difference(a, b), [one.name(), other.name()])
            for one, (a, _) in self.expected.items()
            for other, (b, _) in self.expected.items()
            if one is not other and (one.model, one.size) == (other.model, other.size)
        ]
        return min(found, default=(0.0, []))


def flat(name: str, by_round: list[float]) -> bool:
    """Whether a reading has not grown after the second round; see above."""
    if len(by_round) < 3:
        return True
    second, last = by_round[1], by_round[-1]
    return last <= {"rss": second * GROWTH, "vram": second + GIB}.get(name, second + MORE)


def difference(actual, expected) -> float:
    """Relative error; infinite where shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def read_image(path: Path):
    import numpy
    from PIL import Image

    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB"))


def image_difference(actual: list, expected: list) -> float:
    """The largest mean difference of two images, in 1/255; infinite where sizes or counts differ."""
    if [image.shape for image in actual] != [image.shape for image in expected]:
        return float("inf")
    return max(float(abs(a.astype("int16") - b).mean()) for a, b in zip(actual, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--out", type=Path, required=True, help="written anew; .log is beside it")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tiny", action="store_true", help="small models on the CPU")
    where.add_argument("--gpu", action="store_true", help="a model of real size on a GPU")
    parser.add_argument("--prompts", type=int, help="200 on the CPU, 100 on a GPU")
    parser.add_argument("--variant", choices=["ours", "eager"], default="ours", help="eager: what the host alone keeps")
    parser.add_argument("--model", default="sdxl", help="on a GPU")
    parser.add_argument(
        "--free", type=float, default=4.0, help="GiB that are left free for the half that streams; 0: none does"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no prompt is begun")
    parser.add_argument("--prompt-limit", type=float, default=120, help="seconds after which a prompt counts as dead")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kit-soak", help="models and files")
    options = parser.parse_args()
    if options.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # on shared cores two threads wait for each other
    options.host, options.kjnodes, options.settings = str(Path(options.host).resolve()), None, {}
    options.out.unlink(missing_ok=True)
    options.out.with_suffix(".log").unlink(missing_ok=True)
    bench, free = sessions.Bench(options, "soak"), options.free
    states = gpu_states(options.model) if options.gpu else small_states()
    for model in dict.fromkeys(state.model for state in states):
        sessions.make_files(bench, model)
    prompts = options.prompts or (100 if options.gpu else 200)
    parts = [("CUDA graphs", 0.0, prompts - prompts // 2), ("streaming", free, prompts // 2)]
    if not (options.gpu and free):
        parts = [("CUDA graphs" if options.gpu else "small models", 0.0, prompts)]
    for left, (name, gib, count) in zip(range(len(parts), 0, -1), parts, strict=True):
        if time.monotonic() > bench.deadline:
            print(f"stopped by --limit before {name}", flush=True)
            break
        began = time.perf_counter()
        with bench.server(options.variant, 0) as server:
            more = {"part": name, "free_gib": gib}
            if gib:
                more |= server.post("/session/free", {"gib": gib})
            soak = Soak(bench, server, states, options.variant, tiled=bool(gib))
            try:
                soak.run(count, time.monotonic() + bench.left() / left)
            except (ServerError, PromptRejectedError, RuntimeError, OSError) as error:
                soak.wrong.append({"died": str(error)[-500:]})
            if server.process.poll() is None and options.gpu:
                more |= server.get("/session/graphs")
            more |= {"alive": server.process.poll() is None, "seconds": round(time.perf_counter() - began)}
            bench.known["rows"].append(soak.row(**more))
            bench.save()
    for row in bench.known["rows"]:
        print(json.dumps(row), flush=True)
    if any(row["wrong"] or row["not_flat"] or not row["alive"] for row in bench.known["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
