"""Make docs/compatibility.md: which models compile, on which ComfyUI and PyTorch the tests passed."""

import json

from .results import RESULTS, lines_of

# Family -> set-up of tests/zoo -> what its users call the model.
MODELS = {
    "Stable Diffusion": {
        "sd15": "SD 1.5", "sdxl": "SDXL and its finetunes", "sdxl_refiner": "SDXL refiner",
        "sd3": "SD 3", "sd35": "SD 3.5", "svd_img2vid": "SVD", "zero123": "Stable Zero123", "sd_x4": "SD x4 upscaler",
        "cascade_c": "Stable Cascade",
    },
    "Flux": {
        "flux": "Flux.1 dev, schnell, Fill, Krea", "flux_kontext": "Flux.1 Kontext", "flux2": "Flux.2 dev, klein",
        "chroma": "Chroma", "chroma_radiance": "Chroma Radiance", "ovis": "Ovis-Image", "longcat": "LongCat-Image",
    },
    "Qwen-Image": {"qwen_image": "Qwen-Image", "qwen_image_edit": "Qwen-Image-Edit", "mageflow": "MageFlow"},
    "Z-Image, Lumina": {
        "z_image": "Z-Image, Z-Image Turbo", "lumina2": "Lumina 2", "omnigen2": "OmniGen 2", "boogu": "Boogu",
        "z_image_omni": "Z-Image Omni",
    },
    "Wan": {
        "wan21_t2v": "Wan 2.1, 2.2 text to video", "wan21_i2v": "Wan 2.1, 2.2 image to video", "wan22_5b": "Wan 2.2 5B",
        "wan_vace": "VACE", "wan_camera": "Camera", "wan_s2v": "S2V", "wan_humo": "HuMo", "wan_animate": "Animate",
        "wan_dancer": "Dancer", "wan_causal": "causal Wan", "wan_scail": "SCAIL", "wan_animate2": "Wan Animate 2",
    },
    "Hunyuan": {
        "hunyuan_video": "HunyuanVideo", "hunyuan_video_i2v": "HunyuanVideo image to video",
        "hunyuan_video_15": "HunyuanVideo 1.5", "hunyuan_video_15_sr": "HunyuanVideo 1.5 super resolution",
        "hunyuan_image21": "HunyuanImage 2.1", "hunyuan_image21_refiner": "HunyuanImage 2.1 refiner",
        "hunyuan_dit": "Hunyuan-DiT", "hunyuan3d_v2": "Hunyuan3D 2.0", "hunyuan3d_v21": "Hunyuan3D 2.1",
    },
    "Other images": {
        "hidream_i1": "HiDream-I1", "hidream_o1": "HiDream-O1", "krea2": "Krea 2", "ideogram4": "Ideogram 4",
        "ernie": "ERNIE-Image", "joyimage": "JoyImage", "kandinsky5_image": "Kandinsky 5 image", "auraflow": "AuraFlow",
        "pixart_sigma": "PixArt", "lens": "Lens", "anima_extra_blocks": "Anima", "cosmos_predict2": "Cosmos Predict 2",
        "pixeldit": "PixelDiT",
    },
    "Other video": {
        "ltxv": "LTX-Video", "ltxav": "LTX-2", "ltxav_25": "LTX 2.5", "cosmos1_t2v": "Cosmos 1", "mochi": "Mochi",
        "cogvideox_2b": "CogVideoX", "kandinsky5": "Kandinsky 5 video", "minimax_h3": "MiniMax H3", "seedvr2": "SeedVR2",
    },
    "Audio, 3D": {
        "ace_step1": "ACE-Step 1", "ace_step15": "ACE-Step 1.5", "stable_audio": "Stable Audio", "triposplat": "TripoSplat",
        "trellis2_structure": "Trellis 2 (structure)", "minimax_music3": "MiniMax Music 3",
        "trellis2_shape": "Trellis 2 (shape)",
    },
}  # fmt: skip
IN_PARTS, AGAIN, NO = "in parts", "yes, but more often", "no"
# Set-ups for which `keeps_promise` is False: whether a user's model compiles, and why not whole.
EXCEPTIONS = {
    "hunyuan3d_v21": (IN_PARTS, "its experts are counted by value: a few graphs more at each run of another shape"),
    "z_image_omni": (IN_PARTS, "it sorts slices of tokens, so each block is compiled in pieces"),
    "trellis2_shape": (IN_PARTS, "sizes are taken from the voxels: each block is compiled in pieces, again for new voxels"),
    "minimax_music3": (IN_PARTS, "on a CPU ComfyUI's attention for it reads the free memory; not measured on a GPU"),
    "pixeldit": (AGAIN, "it loops over chunks of pixels: compiled again for each new size"),
    "seedvr2": (NO, "sizes are taken from tensors; runs as without the node"),
    "wan_animate2": (NO, "its blocks are not called by `forward`; runs as without the node, and the node says so"),
}
# The first of the tested ComfyUI 0.26, 0.30 and 0.33 that has the model; models not listed are in all three.
SINCE = {
    **dict.fromkeys(("joyimage", "mageflow", "minimax_h3", "seedvr2"), "0.30"),
    **dict.fromkeys(("ltxav_25", "minimax_music3", "trellis2_structure", "trellis2_shape", "wan_animate2"), "0.33"),
}
PARTS = {"whole": "whole suite", "core": "its core", "newest": "what newer versions can break", "pytorch": "compiling"}

PAGE = """# Compatibility

Every architecture that ComfyUI has is found by its structure, so a model needs no support of its own here; a custom pack's
model compiles too if its blocks are repeated modules. Tested are the {count} below, as tiny models with random weights:
compiled block by block and compared with the uncompiled model, at several sizes, prompt lengths and batches. {kept} of them
compile whole: once for all sizes and prompt lengths, and once more for a batch of one. All since version 0.1.0 of this pack.
A number in brackets: the model needs a newer ComfyUI than 0.26, tested with this one.

## Models
{models}

Not like the others:

{exceptions}

Packs with a loader and sampler of their own (WanVideoWrapper) are not touched: use their own options. Text encoders stay
uncompiled, as they would not gain ([figures](figures.md)).

## ComfyUI and PyTorch
ComfyUI 0.26 or newer; PyTorch 2.9 to 2.15 (with 2.9 the step that needs code waits for it). With another PyTorch that lacks
what compiling needs the model runs uncompiled, and the node says so. With ComfyUI's default allocator (cudaMallocAsync) CUDA
graphs are used on PyTorch 2.11 and 2.15, where that has been measured; with 2.9 and 2.10, and where ComfyUI uses a second GPU
as well, they need its option `--disable-cuda-malloc`. With 2.12 to 2.14 there are none (a bug, pytorch#193402).

{matrix}

Graphs, block groups and differences of each model: [measurements](measurements.md#models).
"""


def outcomes() -> list[dict]:
    """The rows of `tests/sweep.py`, one a set-up."""
    return json.loads((RESULTS / "compatibility.json").read_text())


def keeps_promise(outcome: dict) -> bool:
    """Whether a block group has one graph at the first shape, one more for all others, none later, no breaks, nothing eager."""
    first, after, groups = outcome["graphs"], outcome["graphs_after"], outcome["groups"]
    whole = not outcome["breaks"] and not outcome["eager"] and not outcome["graphs_again"]
    return whole and 0 < first <= groups and after <= groups


def page() -> str:
    rows = outcomes()
    whole = {row["name"] for row in rows if keeps_promise(row)}
    names = {setup: name for family in MODELS.values() for setup, name in family.items()}
    lines = []
    for family, models in MODELS.items():
        shown = [name + (f" ({SINCE[setup]})" if setup in SINCE else "") for setup, name in models.items() if setup in whole]
        lines.append(f"| {family} | {', '.join(shown)} |")
    others = [
        f"| {names[row['name']]} | {EXCEPTIONS[row['name']][0]} | {EXCEPTIONS[row['name']][1]} | {SINCE.get(row['name'], '')} |"
        for row in sorted(rows, key=lambda row: (IN_PARTS, AGAIN, NO).index(EXCEPTIONS.get(row["name"], (NO,))[0]))
        if row["name"] not in whole
    ]
    return PAGE.format(
        count=len(rows),
        kept=len(whole),
        models=lines_of(["family", "compiled whole"], lines),
        exceptions=lines_of(["model", "compiled", "why", "ComfyUI"], others),
        matrix=matrix_table(),
    )


def set_ups_table() -> str:
    head = ["set-up", "blocks", "share of weights", "block groups", "graphs", "more for other shapes", "largest difference"]
    head.append("ComfyUI, PyTorch")
    lines = []
    for o in outcomes():
        classes = _counted(o["classes"])
        note = f"; eager: {', '.join(o['eager'])}" if o["eager"] else ""
        note += f"; eager, as little is to be saved: {_counted(o['left_out'])}" if o.get("left_out") else ""
        note += f"; compiled inside them: {_counted(o['parts'])}" if o.get("parts") else ""
        note += f"; not called: {', '.join(o['idle'])}" if o["idle"] else ""
        note += f"; {o['breaks']} graph breaks" if o["breaks"] else ""
        counts = f"{o['groups']} | {o['graphs']} | {o['graphs_after']} | {o['error']:.0e} | {o['host']}, {o['torch']}"
        lines.append(f"| {o['name']} | {classes}{note} | {o['share']:.0%} | {counts} |")
    return lines_of(head, lines)


def _counted(classes: dict[str, int]) -> str:
    return ", ".join(f"{n} {c}" for c, n in classes.items())


def matrix_table() -> str:
    """One line for each run of tests that `dev.py matrix` recorded: a ComfyUI, a PyTorch and a part, newest first."""
    lines = []
    for run in json.loads((RESULTS / "compatibility-matrix.json").read_text())["runs"]:
        skipped = [f"{count}: {reason}" for reason, count in run["skipped"].items()]
        where = f"{run['date']}, Python {run['python']}, {run['device']}"
        why = "; ".join(skipped).replace("|", "\\|") or "none"
        counts = f"{run['passed']} | {len(run['failed'])}"
        lines.append(f"| {run['comfyui']} | {run['torch']} | {PARTS[run['part']]} | {counts} | {why} | {where} |")
    return lines_of(["ComfyUI", "PyTorch", "tests", "passed", "failed", "skipped or off, and why", "run"], lines)
