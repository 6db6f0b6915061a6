"""Convert shipped workflows to prompts as the page does, and change prompts: tiny models, other inputs, other nodes."""

import copy
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "workflows" / "3 Flux with Torch Compile and Warmup.json"
TEMPLATES = sorted(SHIPPED.parent.glob("*.json"))
KIT = "TorchCompileKit"
MODEL_NODE = KIT + "Model"
WARMUP_NODE = KIT + "Warmup"
BENCHMARK_NODE = KIT + "Benchmark"
MODEL_FILES = {
    "flux": "diffusion_models/tiny-flux.safetensors",
    "wan": "diffusion_models/tiny-wan.safetensors",
    "clip_l": "text_encoders/tiny-clip-l.safetensors",
    "flux_vae": "vae/tiny-flux-vae.safetensors",
}
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
NOT_EXECUTED = {"Note", "MarkdownNote"}


def load(path=SHIPPED):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def inputs_in_order(info):
    """(name, type, options) of a node's inputs, in the order of its widgets; `info` is its /object_info entry."""
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            kind, *rest = info["input"][group][name]
            options = rest[0] if rest else {}
            if isinstance(kind, list):
                kind, options = "COMBO", {"options": kind, **options}
            yield name, kind, options


def widgets(info):
    """What a node's widgets hold when it is put into a graph; `info` is its /object_info entry."""
    found = {}
    for name, kind, options in inputs_in_order(info):
        if kind in WIDGET_TYPES and not options.get("forceInput"):
            found[name] = options["default"] if "default" in options else next(iter(options.get("options", [])), "")
    return found


def to_api(workflow, object_info):
    """The prompt that the page would queue for a workflow. Subgraphs, reroutes and muted nodes are not needed here."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOT_EXECUTED:
            continue
        if node["type"] not in object_info:
            raise ValueError(f"the workflow uses a node the server does not have: {node['type']}")
        values = list(node.get("widgets_values", []))
        inputs = {}
        for name, kind, options in inputs_in_order(object_info[node["type"]]):
            if kind not in WIDGET_TYPES or options.get("forceInput"):
                continue
            if not values:
                raise ValueError(f"node {node['id']} ({node['type']}) has no widget value for its input {name}")
            inputs[name] = values.pop(0)
            if options.get("control_after_generate"):
                values.pop(0)
        if values:
            raise ValueError(f"node {node['id']} ({node['type']}) has widget values without an input: {values}")
        for slot in node.get("inputs", []):
            if slot.get("link") is not None:
                inputs[slot["name"]] = links[slot["link"]]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def find(prompt, class_type):
    """The id of the only node of that class."""
    found = [node_id for node_id, node in prompt.items() if node["class_type"] == class_type]
    if len(found) != 1:
        raise ValueError(f"expected one {class_type} in the prompt, found {len(found)}")
    return found[0]


def change(prompt, class_type, **inputs):
    """A copy of the prompt with other inputs on the only node of that class."""
    prompt = copy.deepcopy(prompt)
    prompt[find(prompt, class_type)]["inputs"].update(inputs)
    return prompt


def shrink(prompt, width=512, height=512, steps=8, seed=1):
    """The shipped prompt with tiny models. Flux' pair of encoders becomes one CLIP-L: no host loads a small T5."""
    prompt = copy.deepcopy(prompt)
    files = {name: Path(path).name for name, path in MODEL_FILES.items()}
    prompt[find(prompt, "DualCLIPLoader")] = {
        "class_type": "CLIPLoader",
        "inputs": {"clip_name": files["clip_l"], "type": "stable_diffusion"},
    }
    prompt = change(prompt, "UNETLoader", unet_name=files["flux"])
    prompt = change(prompt, "VAELoader", vae_name=files["flux_vae"])
    prompt = change(prompt, "EmptySD3LatentImage", width=width, height=height)
    return change(prompt, "KSampler", steps=steps, seed=seed)


def with_latent(prompt, prefix):
    """Add a node that saves the sampler's latent, to compare latents bit by bit."""
    inputs = {"samples": [find(prompt, "KSampler"), 0], "filename_prefix": prefix}
    return {**prompt, "save_latent": {"class_type": "SaveLatent", "inputs": inputs}}


def with_benchmark(prompt, **inputs):
    """Add a Benchmark node with the inputs of the Warmup node; `inputs` are added to these or replace them."""
    given = {name: value for name, value in prompt[find(prompt, WARMUP_NODE)]["inputs"].items() if name != "extra_sizes"}
    node = {"class_type": BENCHMARK_NODE, "inputs": {**given, "steps": 2, "trace": False, **inputs}}
    return {**prompt, "benchmark": node}


def without_kit(prompt):
    """The prompt without our nodes: a node that got its model from one of ours gets the model that ours was given."""
    kit = {node_id: node for node_id, node in prompt.items() if node["class_type"].startswith(KIT)}

    def behind(value):
        while isinstance(value, list) and value[0] in kit:
            value = kit[value[0]]["inputs"]["model"]
        return value

    return {
        node_id: {**node, "inputs": {name: behind(value) for name, value in node["inputs"].items()}}
        for node_id, node in prompt.items()
        if node_id not in kit
    }


def only_warmup(prompt):
    """The Warmup node and all nodes upstream of it, so that no image is sampled."""
    kept, todo = {}, [find(prompt, WARMUP_NODE)]
    while todo:
        node_id = todo.pop()
        if node_id not in kept:
            kept[node_id] = prompt[node_id]
            todo += [value[0] for value in prompt[node_id]["inputs"].values() if isinstance(value, list)]
    return kept
