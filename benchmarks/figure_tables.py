"""Make the tables of docs/measurements.md, and of docs/figures.md the one of parts, from results files."""

from .results import NAMES, PRECISIONS, cell, lines_of, newest, ratio, rows, value_cell

VAES = {
    "flux": "Flux, 1024x1024", "sdxl": "SDXL, 1024x1024", "qwen": "Qwen-Image, 1328x1328", "wan": "Wan 2.1, 832x480x33",
    "ltx": "LTX, 768x512x97", "hunyuan": "HunyuanVideo, 832x480x33",
}  # fmt: skip
KEPT = {True: "channels last", False: "as it was"}


def prebuilt_table() -> str:
    """A line a model: a server that compiles for the first prompt beside one that got prebuild.py's file."""
    servers, sources = rows("prebuilt", "prebuilt")
    pairs: dict[tuple, dict[str, dict]] = {}
    for row in servers:
        if "step" in row:
            pairs.setdefault((row["source"], row["model"], row["weights"]), {})[row["code"]] = row
    lines = []
    for (_, model, weights), of in pairs.items():
        if len(of) < 2:
            continue
        there, built = of["made there"], of["prebuilt"]
        weights = PRECISIONS[model] if weights == "default" else f"{weights} fp8"
        both = [
            f"{there[key]:{digits}}, {built[key]:{digits}}"
            for key, digits in (("compiled", "d"), ("seconds", ".1f"), ("step", ".4f"))
        ]
        both += [str(built.get("used_after", "-")), f"{built['error']:.2g}"]
        card = built["device"].split()[1]
        lines.append(f"| {NAMES[model].partition(',')[0]}, {weights}, {card} | {' | '.join(both)} |")
    head = ["made there, prebuilt", "graphs compiled", "first image, s", "a step, s"]
    head += ["steps from the last trace until all ran compiled: prebuilt", "error between both"]
    return lines_of(head, lines, sources)


def soak_table() -> str:
    """Many prompts in one server, states in turn: every latent against eager's, and what the server keeps."""
    parts, sources = rows("soak", "soak")
    lines = []
    for row in parts:
        where = row["part"] + (f", {row['free_gib']:.0f} GiB free" if row["free_gib"] else "")
        graphs = f"{row['captures']}, {row['replays']}" if "captures" in row else "-"
        kept = [row.get(f"{name}_by_round", []) for name in ("vram", "rss")]
        kept = [f"{round_[0]:g} to {round_[-1]:g}" if round_ else "-" for round_ in kept]
        lines.append(
            f"| {where} | {row['prompts']} of {len(row['states'])} states | {len(row['wrong'])} | {row['largest_error']:.2g} "
            f"| {row['least_difference_of_two_states']:.2g} | {graphs} | {' | '.join(kept)} |"
        )
    head = ["", "prompts", "wrong", "largest error", "two states differ by", "captured, replayed"]
    head += ["GiB of the GPU", "MiB of RAM"]
    return lines_of(head, lines, sources)


def vae_table() -> str:
    """A line a VAE, from the newest run with a peer beside it: seconds of a decode, and what the first one took."""
    decodes, sources = rows("vae", "vae")
    source = newest(decodes, variant="kjnodes")["source"]
    variants = ("eager", "kjnodes", "ours")
    lines = []
    for model, name in VAES.items():
        taken = {}
        for vram in ("legacy", "dynamic"):  # dynamic wins if both have a row
            of = {v: newest(decodes, source=source, model=model, vram=vram, variant=v) for v in variants}
            if of["eager"] and "seconds" in of["eager"]:
                taken, loaded = of, "" if vram == "dynamic" else ", partial loading"
        cells = [value_cell(taken[v], taken["eager"], "seconds", 3) for v in variants]
        firsts = ", ".join(f"{taken[v]['first']:.1f}" if "first" in taken[v] else "-" for v in variants)
        kept = KEPT[taken["ours"]["channels_last"]["decode"]]
        lines.append(f"| {name}{loaded} | {' | '.join(cells)} | {kept} | {firsts} |")
    head = ["seconds to decode", "eager", "KJNodes", "VAE Channels Last", "it keeps", "the first decode: eager, KJNodes, ours"]
    return lines_of(head, lines, sources[-1:])


def controlnet_table() -> str:
    """A line a model, each variant against eager's steps of its process."""
    steps, sources = rows("controlnet", "controlnet_node")
    variants = ("eager", "model alone", "both", "controlnet alone", "controlnet whole")
    lines = []
    for model in sorted({row["model"] for row in steps}):
        taken = {v: newest(steps, model=model, variant=v) for v in variants}
        cells = [cell(taken[v], taken["eager"]) for v in variants]
        errors = [f"{max(taken[v]['errors']):.4f}" for v in variants[1:]]
        lines.append(f"| {NAMES[model]} | {' | '.join(cells)} | {', '.join(errors)} |")
    head = ["seconds per step", "eager", "model compiled", "both", "ControlNet", "ControlNet as KJNodes compiles it", "errors"]
    return lines_of(head, lines, sources)


def training_table() -> str:
    """A line a run of the trainer."""
    steps, sources = rows("training", "training")
    lines = []
    set_up = ("source", "run", "model", "batch", "depth", "bypass", "cudnn")
    for values in dict.fromkeys(tuple(row.get(key) for key in set_up) for row in steps):
        eager, ours = (newest(steps, **dict(zip(set_up, values, strict=True)), variant=v) for v in ("eager", "ours"))
        row = ours or eager
        what = f"batch {row['batch']}, depth {row['depth']}{', bypass' if row['bypass'] else ''}"
        attention = "cuDNN" if row.get("cudnn", True) else "others"
        first = f"{ours['first']:.0f}" if ours and "first" in ours else "-"
        peaks = ", ".join(f"{r['peak_gib']:.0f}" if r and "step" in r else "-" for r in (eager, ours))
        lines.append(
            f"| {NAMES[row['model']]} | {what} | {attention} | {cell(eager, eager)} | {cell(ours, eager)} | {first} | {peaks} |"
        )
    head = ["seconds per step of LoRA training", "trainer", "attention", "eager", "ours", "first step", "peak GiB: eager, ours"]
    return lines_of(head, lines, sources)


def parts_table() -> str:
    """Of docs/figures.md: a line a part, what it gains (newest shares of eager's time) and where it does not."""
    decoded, controlled = rows("vae", "vae")[0], rows("controlnet", "controlnet_node")[0]
    trained = rows("training", "training")[0]

    def vae(model: str) -> str:
        ours = newest(decoded, model=model, variant="ours")
        eager = newest(decoded, source=ours["source"], model=model, vram=ours["vram"], variant="eager")
        return f"{ours['seconds'] / eager['seconds']:.2f}"

    def both(model: str) -> str:
        return ratio(*(newest(controlled, model=model, variant=v) for v in ("both", "eager")))

    def training(model: str) -> str:
        return ratio(*(newest(trained, model=model, batch=1, depth=2, cudnn=False, variant=v) for v in ("ours", "eager")))

    lines = [
        f"| VAE | VAE Channels Last | decoding: Flux {vae('flux')}, SDXL {vae('sdxl')}, Wan {vae('wan')}; nothing is compiled "
        "| Qwen-Image, LTX and HunyuanVideo are left as they are |",
        f"| ControlNet | Torch Compile ControlNet | steps of SDXL {both('sdxl')}, Flux {both('flux')}, the model compiled too "
        "| T2I adapters and Control LoRA are left as they are |",
        f"| LoRA training | Torch Compile | steps of Train LoRA: Flux {training('flux')}, SDXL {training('sdxl')}; "
        "the first takes half a minute | offloaded weights train uncompiled |",
    ]
    return lines_of(["part", "with", "share of the uncompiled time", "does not"], lines)
