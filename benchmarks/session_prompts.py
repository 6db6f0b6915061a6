"""The sessions: which prompts a person queues one after the other, and the graphs that the page would send for them."""

from dataclasses import dataclass

from devtools.prompts import MODEL_NODE, WARMUP_NODE, WIDGET_TYPES, inputs_in_order

from . import models

# variant -> the node that compiles
COMPILERS = {
    "eager": None,
    "core": "TorchCompileModel",
    "kjnodes": "TorchCompileModelAdvanced",  # the newest for every model: those for one model are marked as deprecated
    "ours": MODEL_NODE,
    "warmup": MODEL_NODE,
}


@dataclass(frozen=True)
class Prompt:
    """One press of Run.

    Args:
        other_size, other_text: the session's other size, or its other prompt length.
        lora: the strength of the LoRA, or none.
        restart: the server is started anew before.
    """

    name: str
    other_size: bool = False
    other_text: bool = False
    batch: int = 1
    lora: float | None = None
    restart: bool = False


FULL = (
    Prompt("first image"),
    Prompt("next seed"),
    Prompt("LoRA on", lora=0.8),
    Prompt("LoRA stronger", lora=1.0),
    Prompt("LoRA off"),
    Prompt("new size", other_size=True),
    Prompt("new size again", other_size=True),
    Prompt("batch of 2", batch=2),
    Prompt("other prompt length", other_text=True),
    Prompt("back to the first"),
    Prompt("first after a restart", restart=True),
    Prompt("next"),
    Prompt("once more"),
)
VIDEO = (Prompt("first video"), Prompt("next seed"), Prompt("new size", other_size=True), Prompt("next", other_size=True))
SHORT = (Prompt("first image"), Prompt("next seed"), Prompt("next"))


@dataclass(frozen=True)
class Session:
    """What one person makes with one model; the first size and prompt length are the model's own (models.py)."""

    steps: int
    prompts: tuple[Prompt, ...] = FULL
    other_size: tuple[int, int] = (1152, 896)
    other_tokens: int = 0


SESSIONS = {
    "flux": Session(20, other_tokens=256),
    "sdxl": Session(25, other_tokens=154),
    "z_image": Session(9, other_tokens=200),
    "qwen_image": Session(20, other_size=(1472, 1104), other_tokens=300),
    "wan14": Session(20, VIDEO, other_size=(640, 480)),
    "sd15": Session(20, SHORT),
    "flux_small": Session(4, other_size=(320, 192), other_tokens=96),
    "sdxl_small": Session(4, other_size=(320, 192), other_tokens=154),
    "wan_small": Session(4, VIDEO, other_size=(192, 96)),
}


def widgets(info: dict) -> dict:
    """What a node's widgets hold when it is put into a graph; `info` is its /object_info entry."""
    found = {}
    for name, kind, options in inputs_in_order(info):
        if kind in WIDGET_TYPES and not options.get("forceInput"):
            found[name] = options["default"] if "default" in options else next(iter(options.get("options", [])), "")
    return found


def settings_for(info: dict, settings: dict) -> dict:
    """Those of the settings that this version of the node has."""
    known = widgets(info[MODEL_NODE])
    return {name: value for name, value in settings.items() if name in known}


def graph(name: str, prompt: Prompt, number: int, variant: str, info: dict, settings: dict) -> dict:
    """The prompt as the server takes it.

    Args:
        number: makes the seed another one for each prompt, so that no sampling is answered from the host's cache.
        info: the server's /object_info.
        settings: inputs of Torch Compile Model; those that the server's version does not have are left out.
    """
    model, session = models.MODELS[name], SESSIONS[name]
    width, height = session.other_size if prompt.other_size else model.size[:2]
    tokens = session.other_tokens if prompt.other_text else model.text[1]
    file = f"{name}.safetensors"
    nodes = {}

    def add(node: str, class_type: str, **inputs) -> list:
        nodes[node] = {"class_type": class_type, "inputs": {**widgets(info[class_type]), **inputs}}
        return [node, 0]

    size = {"width": width, "height": height, "batch_size": prompt.batch}
    if model.family is None:
        patcher = add("model", "UNETLoader", unet_name=file, weight_dtype="default")
    else:
        patcher = add("model", "SessionModel", name=name)
    if prompt.lora is not None:
        patcher = add("lora", "LoraLoaderModelOnly", model=patcher, lora_name=file, strength_model=prompt.lora)
    positive = add("prompts", "SessionPrompts", name=name, tokens=tokens, negative_tokens=model.text[1])
    text = {"positive": positive, "negative": ["prompts", 1]}
    if name.startswith("wan"):
        latent = add("latent", "EmptyHunyuanLatentVideo", **size, length=model.size[2])
    else:
        latent = add("latent", "EmptyLatentImage" if model.channels == 4 else "EmptySD3LatentImage", **size)
    if compiler := COMPILERS[variant]:
        own = settings_for(info, settings) if compiler == MODEL_NODE else {}
        patcher = add("compile", compiler, model=patcher, **own)
    if variant == "warmup":
        patcher = add("warmup", WARMUP_NODE, model=patcher, latent_image=latent, cfg=model.cfg, **text)
    sampling = {"seed": 1000 + number, "steps": session.steps, "cfg": model.cfg, "denoise": 1.0}
    sampling |= {"sampler_name": "euler", "scheduler": "simple"}
    samples = add("sampler", "KSampler", model=patcher, latent_image=latent, **text, **sampling)
    images = add("decode", "VAEDecode", samples=samples, vae=add("vae", "VAELoader", vae_name=file))
    if name.startswith("wan"):
        add("save", "SaveAnimatedWEBP", images=images, filename_prefix="session", fps=16.0, lossless=False, method="fastest")
    else:
        add("save", "SaveImage", images=images, filename_prefix="session")
    return nodes
