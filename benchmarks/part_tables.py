"""The tables of what is not the plain denoiser: GGUF, VAEs, ControlNets, caches of steps, block swap, training, encoders."""

from .rows import NAMES, cell, newest, ratio, rows

VAES = {
    "flux": "Flux, 1024x1024", "sdxl": "SDXL, 1024x1024", "qwen": "Qwen-Image, 1328x1328", "wan": "Wan 2.1, 832x480x33",
    "ltx": "LTX, 768x512x97", "hunyuan": "HunyuanVideo, 832x480x33",
}  # fmt: skip
ENCODERS = {
    "flux": "CLIP-L, T5-XXL, 256 tokens (Flux)", "flux, long prompt": "CLIP-L, T5-XXL, 512 tokens (Flux)",
    "sdxl": "CLIP-L, CLIP-G, 77 tokens (SDXL)", "sd15": "CLIP-L, 77 tokens (SD 1.5)",
    "z_image": "Qwen3 4B, 200 tokens (Z-Image)", "qwen_image": "Qwen2.5-VL 7B, 200 tokens (Qwen-Image)",
}  # fmt: skip
KEPT = {True: "channels last", False: "as it was"}


def gguf_table() -> str:
    """A line a packing: each variant against the eager steps of its own process."""
    found, sources = rows("gguf")
    lines = [
        "| seconds per step | packing | eager | KJNodes | ours | graphs, breaks | error: KJNodes, ours |",
        "|---" * 7 + "|",
    ]
    for model, packing in sorted({(row["model"], row["packing"]) for row in found}):
        cells, errors, graphs = {}, [], "-"
        for variant in ("kjnodes", "ours"):
            row = newest(found, model=model, packing=packing, variant=variant)
            eager = row and newest(found, model=model, packing=packing, variant="eager", run=row["run"])
            cells[variant] = cell(row, eager)
            errors.append(f"{row['error']:.4f}" if row else "-")
            if variant == "ours" and row:
                cells["eager"], graphs = cell(eager, eager), f"{row['graphs']}, {row['breaks']}"
        lines.append(
            f"| {NAMES[model]} | {packing} | {cells['eager']} | {cells['kjnodes']} | **{cells['ours']}** | {graphs} "
            f"| {', '.join(errors)} |"
        )
    return "\n".join([*lines, "", *sources])


def _seconds(row: dict | None, eager: dict) -> str:
    if row is None or "died" in row:
        return cell(row, None)
    return f"{row['seconds']:.3f}" + (f" ({row['seconds'] / eager['seconds']:.2f})" if row is not eager else "")


def vae_table() -> str:
    """A line a VAE, from the newest file with a peer beside it: seconds of a decode, and what the first one took."""
    found, sources = rows("vae")
    file = newest(found, variant="kjnodes")["file"]
    variants = ("eager", "kjnodes", "ours")
    lines = []
    for model, name in VAES.items():
        taken = {}
        for vram in ("legacy", "dynamic"):  # the latter, if it decoded so
            of = {v: newest(found, file=file, model=model, vram=vram, variant=v) for v in variants}
            if of["eager"] and "seconds" in of["eager"]:
                taken, loaded = of, "" if vram == "dynamic" else ", partial loading"
        cells = [_seconds(taken[v], taken["eager"]) for v in variants]
        firsts = ", ".join(f"{taken[v]['first']:.1f}" if "first" in taken[v] else "-" for v in variants)
        kept = KEPT[taken["ours"]["channels_last"]["decode"]]
        lines.append(f"| {name}{loaded} | {' | '.join(cells)} | {kept} | {firsts} |")
    head = ["seconds to decode", "eager", "KJNodes", "VAE Channels Last", "it keeps", "the first decode: eager, KJNodes, ours"]
    where = next(line for line in sources if file in line)
    return _lines(head, lines, [f"{where.partition(', `')[0]}, `benchmarks/results/{file}`"])


def _lines(head: list[str], lines: list[str], sources: list[str]) -> str:
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, "", *sources])


def controlnet_node_table() -> str:
    """A line a model, each variant against eager's steps of its process."""
    found, sources = rows("controlnet_node")
    variants = ("eager", "model alone", "both", "controlnet alone", "controlnet whole")
    lines = []
    for model in sorted({row["model"] for row in found}):
        taken = {v: newest(found, model=model, variant=v) for v in variants}
        cells = [cell(taken[v], taken["eager"]) for v in variants]
        errors = [f"{max(taken[v]['errors']):.4f}" for v in variants[1:]]
        lines.append(f"| {NAMES[model]} | {' | '.join(cells)} | {', '.join(errors)} |")
    head = ["seconds per step", "eager", "model compiled", "both", "ControlNet", "ControlNet as KJNodes compiles it", "errors"]
    return _lines(head, lines, sources)


def step_caches_table() -> str:
    """A line a cache, against the same model without one."""
    found, sources = rows("step_caches")
    lines = []
    for model in sorted({row["model"] for row in found}):
        plain = newest(found, model=model, cache="none", variant="eager")
        for cache in ("none", "EasyCache", "LazyCache"):
            eager, ours = (newest(found, model=model, cache=cache, variant=v) for v in ("eager", "ours"))
            counts = f"{eager['ran']}, {ours['replayed']}"
            lines.append(
                f"| {NAMES[model]} | {cache} | {cell(eager, plain)} | {cell(ours, plain)} | {counts} | {ours['error']:.4f} |"
            )
    return _lines(
        ["seconds of a run by its 24 steps", "cache", "eager", "ours", "steps run: eager, ours", "error"], lines, sources
    )


def block_swap_table() -> str:
    """A line a way."""
    found, sources = rows("block_swap")
    names = {
        "resident": "all on the GPU, eager", "hooks": "24 blocks moved by hooks, eager",
        "swap eager": "Block Swap, eager", "swap ours": "Block Swap, Torch Compile Model",
    }  # fmt: skip
    lines = []
    for variant, name in names.items():
        row = newest(found, variant=variant)
        hooks = newest(found, variant="hooks")
        lines.append(f"| {name} | {cell(row, hooks)} | {row['peak_gib']} | {row['error']:.4f} |")
    return _lines(["Flux-dev 12B, 24 of 57 blocks", "seconds per step", "peak GiB", "error"], lines, sources)


def training_table() -> str:
    """A line a run of the trainer."""
    found, sources = rows("training")
    lines = []
    for run in dict.fromkeys(row["run"] for row in found):
        eager, ours = (newest(found, run=run, variant=v) for v in ("eager", "ours"))
        row = ours or eager
        what = f"batch {row['batch']}, depth {row['depth']}{', bypass' if row['bypass'] else ''}"
        attention = "cuDNN" if row.get("cudnn", True) else "others"
        first = f"{ours['first']:.0f}" if ours and "first" in ours else "-"
        peaks = ", ".join(f"{r['peak_gib']:.0f}" if r and "step" in r else "-" for r in (eager, ours))
        lines.append(
            f"| {NAMES[row['model']]} | {what} | {attention} | {cell(eager, eager)} | {cell(ours, eager)} | {first} | {peaks} |"
        )
    head = ["seconds per step of LoRA training", "trainer", "attention", "eager", "ours", "first step", "peak GiB: eager, ours"]
    return _lines(head, lines, sources)


def text_encoder_table() -> str:
    """A line an encoder and task, by device."""
    found, sources = rows("text_encoder")
    lines = []
    for file, model, task in dict.fromkeys((row["file"], row["model"], row["task"]) for row in found):
        eager, ours = (newest(found, file=file, model=model, task=task, variant=v) for v in ("eager", "compiled"))
        device = "GPU" if file.startswith("h200") else "CPU"
        unit = "a token" if task == "generate" else "a prompt"
        lines.append(
            f"| {ENCODERS[model]} | {device} | {unit} | {eager['seconds']:.4f} "
            f"| {ours['seconds']:.4f} ({ours['seconds'] / eager['seconds']:.2f}) | {ours['first']:.1f} |"
        )
    return _lines(["text encoder", "on", "seconds for", "eager", "compiled", "the first compiled"], lines, sources)


def parts_table() -> str:
    """The README's: a line a part, what it gains (newest shares of eager's time) and where it does not."""
    packed, decoded, controlled = rows("gguf")[0], rows("vae")[0], rows("controlnet_node")[0]
    cached, trained, swapped = rows("step_caches")[0], rows("training")[0], rows("block_swap")[0]

    def gguf(packing: str) -> str:
        ours = newest(packed, model="flux", packing=packing, variant="ours")
        return ratio(ours, newest(packed, model="flux", packing=packing, variant="eager", run=ours["run"]))

    def vae(model: str) -> str:
        ours = newest(decoded, model=model, variant="ours")
        eager = newest(decoded, file=ours["file"], model=model, vram=ours["vram"], variant="eager")
        return f"{ours['seconds'] / eager['seconds']:.2f}"

    def both(model: str) -> str:
        return ratio(*(newest(controlled, model=model, variant=v) for v in ("both", "eager")))

    def cache(variant: str) -> str:
        plain = newest(cached, model="sdxl", cache="none", variant="eager")
        taken = (newest(cached, model="sdxl", cache=c, variant=variant) for c in ("EasyCache", "LazyCache"))
        return " and ".join(ratio(row, plain) for row in taken)

    def training(model: str) -> str:
        return ratio(*(newest(trained, model=model, batch=1, depth=2, cudnn=False, variant=v) for v in ("ours", "eager")))

    swap = ratio(*(newest(swapped, variant=v) for v in ("swap ours", "hooks")))
    kinds = ", ".join(f"{kind} {gguf(kind)}" for kind in ("Q4_K", "Q5_K", "Q8_0"))
    lines = [
        f"| GGUF | Torch Compile Model | steps of Flux: {kinds} | layers whose unpacking PyTorch cannot trace run eager |",
        f"| VAE | VAE Channels Last | decoding: Flux {vae('flux')}, SDXL {vae('sdxl')}, Wan {vae('wan')}; nothing is compiled "
        "| Qwen-Image, LTX and HunyuanVideo are left as they are |",
        f"| ControlNet | Torch Compile ControlNet | steps of SDXL {both('sdxl')}, Flux {both('flux')}, the model compiled too "
        "| T2I adapters and Control LoRA are left as they are |",
        f"| EasyCache, LazyCache | Torch Compile Model | SDXL {cache('ours')} of a run without cache, "
        f"which is {cache('eager')} in eager | caches that replace methods (TeaCache) run without CUDA graphs |",
        f"| LoRA training | Torch Compile Model | steps of Train LoRA: Flux {training('flux')}, SDXL {training('sdxl')}; "
        "the first takes half a minute | offloaded weights train uncompiled |",
        f"| block swap | Block Swap | Flux with 24 of 57 blocks in RAM {swap} of blocks moved by hooks "
        "| with dynamic VRAM, ComfyUI's default on NVIDIA, the model is left as it is |",
        "| text encoder | no node | nothing on a GPU, 0.79 on a CPU: 0.3 s an image "
        "| a token or a short prompt takes up to twice as long compiled |",
    ]
    return _lines(["part", "with", "gains", "does not"], lines, [])[:-1]
