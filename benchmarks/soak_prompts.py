"""What the soak queues: the states of a model that take turns, and the prompt of each with and without our nodes."""

from dataclasses import dataclass

from .session_prompts import Prompt, graph, widgets

# A node that patches the model's blocks, and what it is given; the small models have two of each kind of block.
SKIP = ("SkipLayerGuidanceDiT", {"double_layers": "1", "single_layers": "1", "start_percent": 0.0, "end_percent": 1.0})
PATCHES = {"flux": SKIP, "wan": SKIP, "sdxl": ("PerturbedAttentionGuidance", {})}
SMALL_SIZES = {
    "flux_small": [(256, 256), (320, 192)],
    "sdxl_small": [(256, 256), (320, 192)],
    "wan_small": [(128, 128), (192, 96)],
}
OTHER_TOKENS = {"wan_small": 96}  # its session has one length only
# The random LoRA (lora.py) are weak: at these strengths each image is far from the other, and from that without.
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


def prompt(state: State, info: dict, settings: dict | None, steps: int, tiled: bool) -> dict:
    """The prompt of a state, decoded in tiles or whole; without our nodes where `settings` is None. Saves latent and image."""
    asked = Prompt(state.name(), lora=state.lora, other_text=state.other_text)
    nodes = graph(state.model, asked, 0, "eager" if settings is None else "ours", info, settings or {})

    def add(node: str, class_type: str, **inputs) -> None:
        nodes[node] = {"class_type": class_type, "inputs": {**widgets(info[class_type]), **inputs}}

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
