"""Measure decoding, sampling with a ControlNet, and training a LoRA.

    python -m benchmarks.parts --host COMFYUI --kjnodes KJNODES --out FILE [--parts vae-flux controlnet-sdxl]
    python -m benchmarks.parts --host COMFYUI --tiny --out FILE      # small models on the CPU

Whole prompts run on servers that take turns, as in table.py; rows are those of table.py with kind `part`. The prompts:
1. vae: random latents are decoded, and nothing is saved. A step is one decode. The variant `ours` first decodes until VAE
   Channels Last has measured which memory layout is faster.
2. controlnet: a model's image with a ControlNet (`models.build_control`) of strength 0.5. `model`: Torch Compile alone; `both`:
   with Torch Compile ControlNet too.
3. training: ComfyUI's Train LoRA with its defaults, batch 1, on four random latents; the LoRA is saved. Blocks are compiled in
   the first steps that need them, not in the background. If eager training ends with CheckpointError, eager trains again with
   another of PyTorch's attention kernels, which `attention` names.
`first` includes one-time work: seconds of the first decode, of the first training step, of the first prompt with a ControlNet.
"""

import json
import time
from dataclasses import dataclass

from devtools.prompts import KIT

from .sessions import Graph, OutOfTimeError, arguments, parse, settings_for
from .table import KERNELS, LAST_SEED, SETTLED, Contender, Setup, Table, load, prompt_of

# Part -> its variants
VARIANTS = {
    "vae": ("eager", "kjnodes", "ours"),
    "controlnet": ("eager", "model", "both"),
    "training": ("eager", "ours"),
}
CONTROL_NODE = KIT + "ControlNet"
VAE_NODES = {"eager": None, "kjnodes": "TorchCompileVAE", "ours": KIT + "VAEChannelsLast"}
# Part -> how many prompts are measured: decodes are short, trainings long.
COUNTED = {"vae": 7, "controlnet": SETTLED, "training": 1}
TRAINING_STEPS, TINY_TRAINING_STEPS, LATENTS = 12, 3, 4
# The most decodes in which VAE Channels Last prepares and measures, and seconds between two decodes.
MEASURED_DECODES, BETWEEN_DECODES = 20, 1.0


@dataclass(frozen=True)
class Part(Setup):
    """A set-up of table.py with the part that is measured, a key of VARIANTS."""

    part: str = "vae"

    @property
    def name(self) -> str:
        return f"{self.part}-{self.model.removesuffix('14')}"


PARTS = {
    part.name: part
    for part in (
        *(Part(model, part="vae") for model in ("flux", "sdxl", "wan14")),
        *(Part(model, part="controlnet") for model in ("sdxl", "flux")),
        *(Part(model, part="training") for model in ("flux", "sdxl")),
    )
}


class Parts(Table):
    """Measure parts; adds one row for each variant."""

    def __init__(self, options):
        super().__init__(options, "parts")

    def measure_part(self, part: Part, variants: list[str]) -> None:
        model = f"{part.model}_small" if self.options.tiny else part.model
        self.make_files(model, () if part.part == "vae" else ("default",))
        about = {"kind": "part", "part": part.part, "setup": part.name, "model": model}
        self.take_turns(about, part, variants, COUNTED[part.part])

    def nodes_of(self, of: Contender, info: dict, seed: int, kernel: str | None) -> dict:
        graph = Graph(info)
        if of.setup.part == "vae":
            _decode(graph, of, seed)
        elif of.setup.part == "controlnet":
            compiler = "eager" if of.variant == "eager" else "ours"
            graph.nodes = prompt_of(info, of.setup, of.model, compiler, self.steps(of), seed, self.options.settings, kernel)
            _control(graph, of, self.options.settings)
        else:
            steps = TINY_TRAINING_STEPS if self.options.tiny else TRAINING_STEPS
            _train(graph, of, seed, steps, self.options.settings)
        return graph.nodes

    def _first(self, of: Contender) -> None:
        if of.setup.part == "controlnet":
            super()._first(of)
        elif self._run(of, "first", 1000):
            if of.variant == "ours" and of.setup.part == "vae":
                self._measure_layouts(of)
        elif of.setup.part == "training" and of.variant == "eager" and "CheckpointError" in of.row["died"]:
            del of.row["died"]
            of.row["attention"] = KERNELS[self.options.tiny][-1]
            self._run(of, "first", 1000)

    def _measure_layouts(self, of: Contender) -> None:
        """Decode until the node's status line says which memory layout the node keeps."""
        for n in range(1, MEASURED_DECODES):
            if "vaeReady" not in json.dumps(of.row["prompts"][-1].get("lines")):
                return
            time.sleep(BETWEEN_DECODES)
            self._run(of, f"next {n}", 1000 + n)

    def _last(self, of: Contender) -> None:
        if not self._run(of, "settled", LAST_SEED):
            return
        self._sum_up(of)
        first = next(prompt for prompt in of.row["prompts"] if "steps" in prompt)
        of.row["first"] = first["seconds"] if of.setup.part == "controlnet" else first["steps"][0]
        if of.setup.part != "training":
            self._compare(of)
        if of.setup.part == "controlnet" and of.variant == "eager":
            self._noise(of)


def _decode(graph: Graph, of: Contender, seed: int) -> None:
    vae = graph.add("vae", "VAELoader", vae_name=f"{of.model}.safetensors")
    if node := VAE_NODES[of.variant]:
        vae = graph.add("compile", node, vae=vae)
    latent = graph.add("latent", "SessionLatent", name=of.model, seed=seed, batch_size=1)
    graph.add("decode", "SessionDecode", samples=latent, vae=vae)


def _control(graph: Graph, of: Contender, settings: dict) -> None:
    """Add a ControlNet between the prompts and the sampler."""
    control = graph.add("control", "SessionControlNet", name=of.model)
    if of.variant == "both":
        settings = settings_for(graph.info, settings, CONTROL_NODE)
        control = graph.add("compile control", CONTROL_NODE, control_net=control, **settings)
    inputs = {"control_net": control, "image": ["control", 1], "vae": ["vae", 0], "strength": 0.5}
    text = {"positive": ["prompts", 0], "negative": ["prompts", 1]}
    positive = graph.add("apply", "ControlNetApplyAdvanced", **text, **inputs)
    graph.nodes["sampler"]["inputs"] |= {"positive": positive, "negative": ["apply", 1]}


def _train(graph: Graph, of: Contender, seed: int, steps: int, settings: dict) -> None:
    from . import models

    tokens = models.MODELS[of.model].text[1]
    positive = graph.add("prompts", "SessionPrompts", name=of.model, tokens=tokens, negative_tokens=tokens)
    latents = graph.add("latents", "SessionLatent", name=of.model, seed=1, batch_size=LATENTS)
    patcher = load(graph, "model", of.setup, of.model, of.row.get("attention"))
    patcher = graph.compile("compile", patcher, of.variant, settings)
    data = {"model": patcher, "latents": latents, "positive": positive}
    lora = graph.add("train", "TrainLoraNode", **data, steps=steps, seed=seed)
    graph.add("save", "SaveLoRA", lora=lora, prefix="loras/session", steps=["train", 2])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    everything = sorted({variant for of in VARIANTS.values() for variant in of})
    parser.add_argument("--variants", nargs="+", choices=everything, default=everything)
    parser.add_argument("--ready-limit", type=float, default=90, help="seconds for which code is waited for")
    options = parse(parser)
    parts = Parts(options)
    try:
        for part in (PARTS[name] for name in options.parts):
            variants = [v for v in VARIANTS[part.part] if v in options.variants and (options.kjnodes or v != "kjnodes")]
            if lacking := [variant for variant in variants if not parts.measured(part, variant)]:
                parts.measure_part(part, lacking)
    except OutOfTimeError:
        print(f"stopped by --limit {options.limit:g}; what there is is in {options.out}", flush=True)


if __name__ == "__main__":
    main()
