"""Make the tables of docs/measurements.md, and of docs/figures.md the one of parts, from results files."""

import json
from statistics import median

from .results import (
    NAMES,
    PEERS,
    SMALL,
    cell,
    eager_beside,
    error_of,
    lines_of,
    newest,
    noise_of,
    ratio,
    rows,
)

# Ways of holding the weights (kind of VRAM management, GiB free).
HOLDING = {
    ("legacy", 0.0): "dynamic VRAM off",
    ("dynamic", 0.0): "dynamic VRAM",
    ("dynamic", 14.0): "dynamic VRAM, 14 GiB free",
    ("legacy", 14.0): "partial loading, 14 GiB free",
}
# PyTorch's phases of compiling by what their names hold; what holds none of them is AOTAutograd's.
PHASES = {
    "Dynamo": ("bytecode_tracing", "guards", "compile_attempt"),
    "AOTAutograd, passes": (),
    "inductor": ("GraphLowering", "Scheduler", "Codegen", "fx_codegen"),
    "waiting for kernels": ("async_compile.wait", "PyCodeCache"),
}
STARTS = {
    "first": "first start, nothing on disk",
    "second": "restart, sampling at once",
    "early": "restart, 5 s of text encoding between node and sampler",
    "carried": "empty cache, a file in Load Compile Cache, sampling at once",
    "carried early": "empty cache, a file in Load Compile Cache, 5 s likewise",
    "eager": "eager, a new process",
}
# Modes of the rows of `formats.json`.
FORMAT_MODES = "eager", "in the background", "at once"
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
PACKS = {"eager": "nothing", "core": "core", "kjnodes": "KJNodes", "wanvideowrapper": "WanVideoWrapper", "ours": "ours"}


def newest_pair(steps: list[dict], model: str) -> tuple[dict | None, dict | None]:
    """(eager, ours) of the process that ran last."""
    ours = newest(steps, model=model, variant="ours")
    return (None, None) if ours is None or "died" in ours else (eager_beside(steps, ours), ours)


def _beside_peers(steps: list[dict], model: str) -> dict[str, tuple[dict, dict | None]]:
    """Peer -> its newest row, and the last eager one of the same run: a peer has a process of its own."""
    peers = {peer: newest(steps, model=model, variant=peer) for peer in PEERS}
    return {p: (row, newest(steps, model=model, variant="eager", source=row["source"])) for p, row in peers.items() if row}


def step_time_table() -> str:
    """A line a model: eager and ours of the newest process, each peer against the eager of its own run."""
    steps, sources = rows("step-time", "step_time")
    lines = []
    for model, name in NAMES.items():
        eager, ours = newest_pair(steps, model)
        if ours is None:
            continue
        peers = _beside_peers(steps, model)
        ratios = [ratio(*peers.get(peer, (None, None))) for peer in reversed(PEERS)]
        cold = f"{ours['cold_start']:.1f}" if ours.get("head_start") else "-"
        other = peers.get("kjnodes", ({},))[0].get("cold_start")
        peaks = ", ".join(f"{row.get('peak_gib', 0):.1f}" for row in (eager, ours) if row)
        errors = ", ".join(error_of(row) for row in (ours, *(peers.get(peer, (None,))[0] for peer in reversed(PEERS))))
        noises = [noise_of(row) for row in steps if row["model"] == model and noise_of(row) is not None]
        noise = f"{noises[-1]:.4f}" if noises else "-"
        lines.append(
            f"| {name} | {cell(eager, eager)} | **{cell(ours, eager)}** | {' | '.join(ratios)} "
            f"| {cold}, {'-' if other is None else f'{other:.1f}'} | {ours['graphs']} | {peaks} | {errors} | {noise} |"
        )
    head = ["model", "eager", "ours", "KJNodes", "core", "cold start, s: ours, KJNodes", "graphs"]
    return lines_of([*head, "peak VRAM, GiB: eager, ours", "error: ours, KJNodes, core", "noise"], lines, sources)


def low_vram_table() -> str:
    steps, sources = rows("low-vram", "low_vram")
    labels = ["eager", "core", "kjnodes", "ours, same attention", "ours"]
    lines = []
    for vram in ("dynamic", "legacy"):
        for free in sorted({r["free_gib"] for r in steps if r["vram"] == vram}, key=lambda f: -f or -1e9):
            here = {r["variant"]: r for r in steps if r["vram"] == vram and r["free_gib"] == free}
            cells = [cell(here.get(label), here.get("eager")) for label in labels]
            counts = [
                f"{r.get('graphs', '-')}, {r.get('breaks', '-')}" if (r := here.get(label)) else "-"
                for label in ("kjnodes", "ours")
            ]
            title = f"{'all' if not free else f'{free:g} GiB'}{', partial loading' if vram == 'legacy' else ''}"
            lines.append(f"| {title} | " + " | ".join([*cells, *counts]) + " |")
    return lines_of(["free VRAM", *labels, "graphs, breaks: KJNodes", "ours"], lines, sources)


def kernels_table() -> str:
    """Where the time of a step goes: the newest profile of each model."""
    profiles, sources = rows("kernels", "kernels")
    kinds = ["matrix products", "attention", "compiled elementwise", "other elementwise", "copies"]
    lines = []
    for model, name in NAMES.items():
        for variant in ("eager", "ours"):
            if row := newest(profiles, model=model, variant=variant):
                cells = [f"{row['seconds'].get(kind, 0) * 1000:.1f}" for kind in kinds]
                lines.append(f"| {name} | {variant} | {' | '.join(cells)} | {row['kernels']} |")
    return lines_of(["ms per step", "", *kinds, "kernels"], lines, sources)


def cold_table() -> str:
    """Where a first step goes with nothing on disk: every row, oldest code first."""
    starts, sources = rows("cold-start", "cold start")
    lines = []
    for model, name in NAMES.items():
        for row in (row for row in starts if row["model"] == model):
            sums = [sum(s for phase, s in row["phases"].items() if _group_of(phase) == group) for group in PHASES]
            cells = [f"{seconds:.1f}" for seconds in (row["cold_start"], *sums)]
            tuning = f"{row['tuning']:.1f}" if "tuning" in row else "-"
            floor = row["cold_start"] - sums[-1] - row.get("tuning", 0) - row["outside"]
            lines.append(
                f"| {name.split(',')[0]}, {row['graphs']} graphs | {row['settings'].get('mode', 'default')} "
                f"| {row.get('code', '-')} | {' | '.join(cells)} | {tuning} | {row['outside']:.1f} | {floor:.1f} |"
            )
    return lines_of(["seconds", "mode", "code", "cold start", *PHASES, "tuning", "outside", "floor"], lines, sources)


def _group_of(phase: str) -> str:
    return next((group for group, words in PHASES.items() if any(word in phase for word in words)), "AOTAutograd, passes")


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
    head = [
        "",
        "prompts",
        "wrong",
        "largest error",
        "two states differ by",
        "captured, replayed",
        "GiB of the GPU",
        "MiB of RAM",
    ]
    return lines_of(head, lines, sources)


def lora_table() -> str:
    steps, sources = rows("lora", "lora")
    lines = []
    for state in dict.fromkeys(row["state"] for row in steps if "ours_step" in row):
        here = [newest(steps, state=state, vram=vram, free_gib=free) for vram, free in HOLDING]
        cells = [f"{r['ours_step']:.4g} ({r['ours_step'] / r['eager_step']:.2f})" if r else "-" for r in here]
        lines.append(f"| {state} | {' | '.join(cells)} | {sum(r['graphs'] for r in here if r)} |")
    return lines_of(["LoRA", *HOLDING.values(), "graphs compiled"], lines, sources)


def restart_table() -> str:
    """Every start of Flux in the newest run, one number a process and a column a machine; then the other models."""
    starts, sources = rows("restart", "restart")
    starts = [row for row in starts if row["source"] == starts[-1]["source"] and not row.get("under_profiler")]
    flux = [row for row in starts if row["model"] == "flux"]
    columns = list(dict.fromkeys((row.get("code", "-"), row.get("machine", 1)) for row in flux))
    lines = []
    for run, name in STARTS.items():
        cells = []
        for code, machine in columns:
            key = (run, code, machine)
            here = [row for row in flux if (row["run"], row.get("code", "-"), row.get("machine", 1)) == key]
            compiling = ", ".join(f"{row['compile_seconds']:.1f}" for row in here if "compile_seconds" in row)
            cells.append(", ".join(f"{row['above']:.2f}" for row in here) + (f" ({compiling})" if compiling else ""))
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cell or '-' for cell in cells)} |")
    head = ["first step above a warm one, s", *(f"machine {machine}, code {code}" for code, machine in columns)]
    others = []
    for model, settings in dict.fromkeys((row["model"], json.dumps(row.get("settings", {}))) for row in starts):
        first, early, eager = (
            newest(starts, model=model, run=run, settings=json.loads(settings)) for run in ("first", "early", "eager")
        )
        if model != "flux" and early:
            mode = early["settings"].get("mode", "default")
            times = " | ".join(f"{row['above']:.1f}" if row else "-" for row in (first, early, eager))
            others.append(f"| {NAMES[model]} | {mode} | {times} | {early['graphs']} | {early['traced']} |")
    second = lines_of(["model", "mode", "first start", "restart", "eager", "graphs", "traced again"], others, sources[-1:])
    return f"{lines_of(head, lines)}\n\n{second}"


def fusions_table() -> str:
    """Kernels of ours, or that we make inductor choose, beside what there would be."""
    norms, _ = rows("fusions", "group norm")
    group_norms = [
        f"| {row['channels']} channels, {row['side']}x{row['side']} | {norm['eager']}, {norm['ours']} "
        f"| {conv['eager']}, {conv['channels_last']} and {conv['turning_the_weight']} for turning the weight |"
        for row in norms
        for norm, conv in [(row["norm_and_silu"], row["convolution"])]
    ]
    passes, sources = rows("fusions", "norm in one pass")
    columns = {
        "norm_and_modulation": "layer norm, scale, shift",
        "gate_norm_and_modulation": "residual, gate and the same",
        "rms_norm": "RMS norm",
    }
    one_pass = [
        f"| {row['tokens']} tokens of {row['width']} | "
        + " | ".join(f"{row[key]['looped']}, {row[key]['one_pass']}" for key in columns)
        + " |"
        for row in passes
    ]
    head = ["microseconds, two images", "group norm and SiLU: PyTorch, ours", "convolution: as it is, channels_last"]
    return "\n\n".join(
        [
            lines_of(head, group_norms),
            lines_of(["microseconds: looped, in one pass", *columns.values()], one_pass, sources),
        ]
    )


def gguf_table() -> str:
    """A line a packing: each variant against the eager steps of its own process."""
    steps, sources = rows("gguf", "gguf")
    lines = []
    for model, packing in sorted({(row["model"], row["packing"]) for row in steps}):
        cells, errors, graphs = {}, [], "-"
        for variant in ("kjnodes", "ours"):
            row = newest(steps, model=model, packing=packing, variant=variant)
            eager = row and eager_beside(steps, row, packing=packing)
            cells[variant] = cell(row, eager)
            errors.append(error_of(row))
            if variant == "ours" and row:
                cells["eager"], graphs = cell(eager, eager), f"{row['graphs']}, {row['breaks']}"
        lines.append(
            f"| {NAMES[model]} | {packing} | {cells['eager']} | {cells['kjnodes']} | **{cells['ours']}** | {graphs} "
            f"| {', '.join(errors)} |"
        )
    head = ["seconds per step", "packing", "eager", "KJNodes", "ours", "graphs, breaks", "error: KJNodes, ours"]
    return lines_of(head, lines, sources)


def vae_table() -> str:
    """A line a VAE, from the newest run with a peer beside it: seconds of a decode, and what the first one took."""
    decodes, sources = rows("vae", "vae")
    source = newest(decodes, variant="kjnodes")["source"]
    variants = ("eager", "kjnodes", "ours")
    lines = []
    for model, name in VAES.items():
        taken = {}
        for vram in ("legacy", "dynamic"):  # the latter, if it decoded so
            of = {v: newest(decodes, source=source, model=model, vram=vram, variant=v) for v in variants}
            if of["eager"] and "seconds" in of["eager"]:
                taken, loaded = of, "" if vram == "dynamic" else ", partial loading"
        cells = [_seconds(taken[v], taken["eager"]) for v in variants]
        firsts = ", ".join(f"{taken[v]['first']:.1f}" if "first" in taken[v] else "-" for v in variants)
        kept = KEPT[taken["ours"]["channels_last"]["decode"]]
        lines.append(f"| {name}{loaded} | {' | '.join(cells)} | {kept} | {firsts} |")
    head = ["seconds to decode", "eager", "KJNodes", "VAE Channels Last", "it keeps", "the first decode: eager, KJNodes, ours"]
    return lines_of(head, lines, sources[-1:])


def _seconds(row: dict | None, eager: dict) -> str:
    if row is None or "died" in row:
        return cell(row, None)
    return f"{row['seconds']:.3f}" + (f" ({row['seconds'] / eager['seconds']:.2f})" if row is not eager else "")


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


def step_caches_table() -> str:
    """A line a cache, against the same model without one."""
    runs, sources = rows("step-caches", "step_caches")
    lines = []
    for model in sorted({row["model"] for row in runs}):
        plain = newest(runs, model=model, cache="none", variant="eager")
        for cache in ("none", "EasyCache", "LazyCache"):
            eager, ours = (newest(runs, model=model, cache=cache, variant=v) for v in ("eager", "ours"))
            counts = f"{eager['ran']}, {ours['replayed']}"
            lines.append(
                f"| {NAMES[model]} | {cache} | {cell(eager, plain)} | {cell(ours, plain)} | {counts} | {ours['error']:.4f} |"
            )
    head = ["seconds of a run by its 24 steps", "cache", "eager", "ours", "steps run: eager, ours", "error"]
    return lines_of(head, lines, sources)


def block_swap_table() -> str:
    """A line a way."""
    steps, sources = rows("block-swap", "block_swap")
    names = {
        "resident": "all on the GPU, eager", "hooks": "24 blocks moved by hooks, eager",
        "swap eager": "Torch Compile Block Swap, eager", "swap ours": "Torch Compile Block Swap, Torch Compile",
    }  # fmt: skip
    hooks, lines = newest(steps, variant="hooks"), []
    for variant, name in names.items():
        row = newest(steps, variant=variant)
        lines.append(f"| {name} | {cell(row, hooks)} | {row['peak_gib']} | {row['error']:.4f} |")
    return lines_of(["Flux-dev 12B, 24 of 57 blocks", "seconds per step", "peak GiB", "error"], lines, sources)


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


def text_encoder_table() -> str:
    """A line an encoder and task, by device."""
    calls, sources = rows("text-encoder", "text_encoder")
    lines = []
    for source, model, task in dict.fromkeys((row["source"], row["model"], row["task"]) for row in calls):
        eager, ours = (newest(calls, source=source, model=model, task=task, variant=v) for v in ("eager", "compiled"))
        unit = "a token" if task == "generate" else "a prompt"
        lines.append(
            f"| {ENCODERS[model]} | {'GPU' if 'NVIDIA' in eager['device'] else 'CPU'} | {unit} | {eager['seconds']:.4f} "
            f"| {ours['seconds']:.4f} ({ours['seconds'] / eager['seconds']:.2f}) | {ours['first']:.1f} |"
        )
    return lines_of(["text encoder", "on", "seconds for", "eager", "compiled", "the first compiled"], lines, sources)


def cpu_table() -> str:
    """Step times, restarts and cancelled warmups of small models on a CPU."""
    steps, sources = rows("cpu", "cpu_step_time", "step_time")
    lines = []
    for model, name in SMALL.items():
        of = [newest(steps, model=model, variant=variant) for variant in (*PEERS, "ours")]
        pairs = [(row, row and eager_beside(steps, row)) for row in of]
        cells = " | ".join(cell(row, eager) for row, eager in pairs)
        counts = ", ".join(f"{row['graphs']}/{row['breaks']}" if row else "-" for row in of)
        errors = ", ".join(f"{row['error']:.0e}" if row else "-" for row in of)
        eager = pairs[-1][1]
        lines.append(f"| {name} | {cell(eager, eager)} | {cells} | {counts} | {errors} | {noise_of(eager):.0e} |")
    head = ["model, seconds per step", "eager", "core", "KJNodes", "ours", "graphs, breaks: core, KJNodes, ours"]
    table = lines_of([*head, "error: core, KJNodes, ours", "noise"], lines)
    names = {"first": "first start", "second": "restart, sampling at once", "carried": "empty machine, cache file"}
    starts, _ = rows("cpu", "cpu_restart", "restart")
    compiling = []
    for model, name in SMALL.items():
        here = [newest(starts, model=model, run=run) for run in names]
        compiling.append(f"| {name} | {' | '.join(_compile_seconds(row, here[0]) for row in here)} |")
    second = lines_of(["model, seconds of compiling", *names.values()], compiling)
    return "\n\n".join([table, second, _cancel_sentence(), "\n".join(sources)])


def _cancel_sentence() -> str:
    prompts, _ = rows("cpu", "cpu_cancel")
    cancels, after = [row for row in prompts if "after_the_graph" in row], prompts[-1]
    longest = max(row["after_the_graph"] for row in cancels)
    return (
        f"Cancel: {len(cancels)} warmups of three sizes (tiny Flux, real server) were cancelled inside a graph; they were over "
        f"at most {longest:.2f} s after the end of that graph. The run after them compiled what was left, {after['graphs']} of "
        f"the graphs, and its latent is {after['error']:.0e} from eager's."
    )


def _compile_seconds(row: dict, first: dict) -> str:
    share = f" ({row['compile_seconds'] / first['compile_seconds']:.2f})" if row is not first else ""
    return f"{row['compile_seconds']:.1f}{share}"


def first_minutes_table() -> str:
    """What a newcomer does, waits for and is told, with each pack."""
    packs, sources = rows("first-minutes", "first minutes")
    of = {row["variant"]: row for row in packs}
    lines = []
    for variant, name in PACKS.items():
        row = of[variant]
        seconds = [f"{row['seconds'][prompt]:.1f}" if row["seconds"] else "-" for prompt in ("first", "next", "size", "again")]
        counts = [str(row["nodes"]), str(row["links"]), f"{row['inputs_shown']}, {row['inputs']}"]
        lines.append(f"| {' | '.join([name, *counts, *seconds, row['told']])} |")
    head = [
        "",
        "nodes to add",
        "links to draw",
        "inputs shown, all",
        "first image, s",
        "next",
        "new size",
        "again",
        "told then",
    ]
    return lines_of(head, lines, sources)


def formats_table() -> str:
    """How a format of Flux's weights comes to compiled code, in both modes of the node."""
    prompts, sources = rows("formats", "format")
    lines = []
    for weights in dict.fromkeys(row["weights"] for row in prompts):
        of = {mode: [row for row in prompts if (row["weights"], row["mode"]) == (weights, mode)] for mode in FORMAT_MODES}
        first = of["eager"][0]["seconds"]
        usual = _range_of(of["eager"][1:])
        lines.append(f"| {weights} | eager | {first:.1f} | {usual} | - | - |")
        compiled = min(median(row["steps"]) for mode in FORMAT_MODES[1:] for row in of[mode][1:])
        for mode in FORMAT_MODES[1:]:
            # A step of compiled code is clearly faster than what runs before it.
            ready = [row for row in of[mode][1:] if median(row["steps"]) < 1.05 * compiled]
            before = of[mode][1 : ready[0]["number"] - 1] if ready else of[mode][1:]
            at = "in the first" if mode == "at once" else f"in prompt {ready[0]['number'] - 1}" if ready else "after these"
            cells = [f"{of[mode][0]['seconds']:.1f} ({of[mode][0]['seconds'] / first:.2f})", _range_of(before) or "-", at]
            lines.append(f"| {weights} | {mode} | {' | '.join(cells)} | {_range_of(ready) or '-'} |")
    return lines_of(["weights", "blocks", "first image, s", "next, s", "code ready", "then, s"], lines, sources)


def _range_of(prompts: list[dict]) -> str:
    found = sorted(row["seconds"] for row in prompts)
    if not found:
        return ""
    return f"{found[0]:.2f}" if found[0] == found[-1] else f"{found[0]:.2f} to {found[-1]:.2f}"


def parts_table() -> str:
    """Of docs/figures.md: a line a part, what it gains (newest shares of eager's time) and where it does not."""
    packed, decoded, controlled = rows("gguf", "gguf")[0], rows("vae", "vae")[0], rows("controlnet", "controlnet_node")[0]
    cached, trained = rows("step-caches", "step_caches")[0], rows("training", "training")[0]
    swapped = rows("block-swap", "block_swap")[0]

    def gguf(packing: str) -> str:
        ours = newest(packed, model="flux", packing=packing, variant="ours")
        return ratio(ours, eager_beside(packed, ours, packing=packing))

    def vae(model: str) -> str:
        ours = newest(decoded, model=model, variant="ours")
        eager = newest(decoded, source=ours["source"], model=model, vram=ours["vram"], variant="eager")
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
        f"| GGUF | Torch Compile | steps of Flux: {kinds} | layers whose unpacking PyTorch cannot trace run uncompiled |",
        f"| VAE | VAE Channels Last | decoding: Flux {vae('flux')}, SDXL {vae('sdxl')}, Wan {vae('wan')}; nothing is compiled "
        "| Qwen-Image, LTX and HunyuanVideo are left as they are |",
        f"| ControlNet | Torch Compile ControlNet | steps of SDXL {both('sdxl')}, Flux {both('flux')}, the model compiled too "
        "| T2I adapters and Control LoRA are left as they are |",
        f"| EasyCache, LazyCache | Torch Compile | SDXL {cache('ours')} of a run without cache, "
        f"which is {cache('eager')} uncompiled | caches that replace methods (TeaCache) run without CUDA graphs |",
        f"| LoRA training | Torch Compile | steps of Train LoRA: Flux {training('flux')}, SDXL {training('sdxl')}; "
        "the first takes half a minute | offloaded weights train uncompiled |",
        f"| block swap | Torch Compile Block Swap | Flux with 24 of 57 blocks in RAM {swap} of blocks moved by hooks "
        "| with dynamic VRAM, ComfyUI's default on NVIDIA, the model is left as it is |",
        "| text encoder | no node | nothing on a GPU | compiled, a token or a short prompt takes up to twice as long |",
    ]
    return lines_of(["part", "with", "share of the uncompiled time", "does not"], lines)
