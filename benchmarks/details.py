"""The tables of docs/figures.md."""

import json

from .rows import NAMES, PEERS, SMALL, cell, newest, noise_of, rows

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


def kernels_table() -> str:
    """Where the time of a step goes: the newest profile of each model."""
    found, sources = rows("kernels")
    kinds = ["matrix products", "attention", "compiled elementwise", "other elementwise", "copies"]
    lines = [f"| ms per step | | {' | '.join(kinds)} | kernels |", "|---" * (len(kinds) + 3) + "|"]
    for model, name in NAMES.items():
        for variant in ("eager", "ours"):
            row = newest(found, model=model, variant=variant)
            if row:
                cells = [f"{row['seconds'].get(kind, 0) * 1000:.1f}" for kind in kinds]
                lines.append(f"| {name} | {variant} | {' | '.join(cells)} | {row['kernels']} |")
    return "\n".join([*lines, "", *sources])


def cold_table() -> str:
    """Where a first step goes with nothing on disk: every row, oldest code first."""
    found, sources = rows("cold start")
    lines = [
        f"| seconds | mode | code | cold start | {' | '.join(PHASES)} | tuning | outside | floor |",
        "|---" * (len(PHASES) + 7) + "|",
    ]
    for model, name in NAMES.items():
        for row in (row for row in found if row["model"] == model):
            sums = [sum(s for phase, s in row["phases"].items() if _group_of(phase) == group) for group in PHASES]
            cells = [f"{seconds:.1f}" for seconds in (row["cold_start"], *sums)]
            tuning = f"{row['tuning']:.1f}" if "tuning" in row else "-"
            floor = row["cold_start"] - sums[-1] - row.get("tuning", 0) - row["outside"]
            lines.append(
                f"| {name.split(',')[0]}, {row['graphs']} graphs | {row['settings'].get('mode', 'default')} | {row['code']} "
                f"| {' | '.join(cells)} | {tuning} | {row['outside']:.1f} | {floor:.1f} |"
            )
    return "\n".join([*lines, "", *sources])


def _group_of(phase: str) -> str:
    return next((group for group, words in PHASES.items() if any(word in phase for word in words)), "AOTAutograd, passes")


def graphs_table() -> str:
    """Many runs with CUDA graphs, of the newest file."""
    found, sources = rows("graphs")
    found, sources = [row for row in found if row["file"] == found[-1]["file"]], sources[-1:]
    lines = [
        "| | runs | wrong | largest error | captured, replayed | last step: eager, ours | GiB in use: first round, end |",
        "|---" * 7 + "|",
    ]
    for row in found:
        ratio = row["last_step"] / row["eager_last_step"]
        lines.append(
            f"| {NAMES[row['model']].split(',')[0]}, dynamic VRAM {'on' if row['vram'] == 'dynamic' else 'off'} "
            f"| {row['runs']} | {row['wrong']} | {row['largest_error']:.4f} | {row['captured']}, {row['replayed']} "
            f"| {row['eager_last_step']:.4g}, {row['last_step']:.4g} ({ratio:.2f}) "
            f"| {row['gib_after_first_round']}, {row['gib_at_the_end']} |"
        )
    return "\n".join([*lines, "", *sources])


def lora_table() -> str:
    found, sources = rows("lora")
    states = list(dict.fromkeys(row["state"] for row in found if "ours_step" in row))
    lines = ["| LoRA | " + " | ".join(HOLDING.values()) + " | graphs compiled |", "|---" * (len(HOLDING) + 2) + "|"]
    for state in states:
        here = [newest(found, state=state, vram=vram, free_gib=free) for vram, free in HOLDING]
        cells = [f"{r['ours_step']:.4g} ({r['ours_step'] / r['eager_step']:.2f})" if r else "-" for r in here]
        lines.append(f"| {state} | {' | '.join(cells)} | {sum(r['graphs'] for r in here if r)} |")
    return "\n".join([*lines, "", *sources])


def restart_table() -> str:
    """Every start of Flux in the newest file, one number a process and a column a machine; then the other models."""
    found, sources = rows("restart")
    found = [row for row in found if row["file"] == found[-1]["file"] and not row.get("under_profiler")]
    flux = [row for row in found if row["model"] == "flux"]
    columns = list(dict.fromkeys((row["code"], row["machine"]) for row in flux))
    head = ["first step above a warm one, s", *(f"machine {machine}, code {code}" for code, machine in columns)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for run, name in STARTS.items():
        cells = []
        for code, machine in columns:
            here = [row for row in flux if (row["run"], row["code"], row["machine"]) == (run, code, machine)]
            compiling = ", ".join(f"{row['compile_seconds']:.1f}" for row in here if "compile_seconds" in row)
            cells.append(", ".join(f"{row['above']:.2f}" for row in here) + (f" ({compiling})" if compiling else ""))
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cell or '-' for cell in cells)} |")
    lines += ["", "| model | mode | first start | restart | eager | graphs | traced again |", "|---" * 7 + "|"]
    for model, settings in dict.fromkeys((row["model"], json.dumps(row.get("settings", {}))) for row in found):
        first, early, eager = (
            newest(found, model=model, run=run, settings=json.loads(settings)) for run in ("first", "early", "eager")
        )
        if model != "flux" and early:
            mode = early["settings"].get("mode", "default")
            times = " | ".join(f"{row['above']:.1f}" if row else "-" for row in (first, early, eager))
            lines.append(f"| {NAMES[model]} | {mode} | {times} | {early['graphs']} | {early['traced']} |")
    return "\n".join([*lines, "", *sources[-1:]])


def fusions_table() -> str:
    """Kernels of ours, or that we make inductor choose, beside what there would be."""
    found, _ = rows("group norm")
    lines = [
        "| microseconds, two images | group norm and SiLU: PyTorch, ours | convolution: as it is, channels_last |",
        "|---|---|---|",
    ]
    for row in found:
        norm, conv = row["norm_and_silu"], row["convolution"]
        lines.append(
            f"| {row['channels']} channels, {row['side']}x{row['side']} | {norm['eager']}, {norm['ours']} "
            f"| {conv['eager']}, {conv['channels_last']} and {conv['turning_the_weight']} for turning the weight |"
        )
    found, _ = rows("norm in one pass")
    columns = {
        "norm_and_modulation": "layer norm, scale, shift",
        "gate_norm_and_modulation": "residual, gate and the same",
        "rms_norm": "RMS norm",
    }
    lines += ["", f"| microseconds: looped, in one pass | {' | '.join(columns.values())} |", "|---" * 4 + "|"]
    for row in found:
        cells = [f"{row[key]['looped']}, {row[key]['one_pass']}" for key in columns]
        lines.append(f"| {row['tokens']} tokens of {row['width']} | {' | '.join(cells)} |")
    found, sources = rows("gelu in a product")
    lines += ["", "| microseconds | product, then GELU | GELU inside | product alone |", "|---|---|---|---|"]
    for row in found:
        took = row["microseconds"]
        lines.append(
            f"| {row['tokens']} tokens, {row['width']} to {row['wide']} "
            f"| {took['separate']} | {took['inside']} | {took['product_alone']} |"
        )
    return "\n".join([*lines, "", *sources])


def controlnet_table() -> str:
    found, sources = rows("controlnet")
    head = ["seconds per step", "eager", "ours", "captured, replayed", "largest error", "what ControlNet changes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found:
        slower = max(row["step"], row["step_again"])
        lines.append(
            f"| {NAMES[row['model']]} | {row['eager']:.4g} | {slower:.4g} ({slower / row['eager']:.2f}) "
            f"| {row['captured']}, {row['replayed']} | {max(*row['errors'], row['without']):.4f} | {row['changes_image']:.3g} |"
        )
    return "\n".join([*lines, "", *sources])


def cpu_table() -> str:
    """Step times, restarts and cancel of the newest run of benchmarks.cpu."""
    found, sources = rows("cpu_step_time")
    lines = [
        "| model, seconds per step | eager | core | KJNodes | ours | graphs, breaks: core, KJNodes, ours "
        "| error: core, KJNodes, ours | noise |",
        "|---" * 8 + "|",
    ]
    for model, name in SMALL.items():
        pairs = []
        for variant in (*PEERS, "ours"):
            row = newest(found, model=model, variant=variant)
            eager = row and newest(found, model=model, variant="eager", file=row["file"], process=row["process"])
            pairs.append((row, eager))
        cells = " | ".join(cell(row, eager) for row, eager in pairs)
        counts = ", ".join(f"{row['graphs']}/{row['breaks']}" if row else "-" for row, _ in pairs)
        errors = ", ".join(f"{row['error']:.0e}" if row else "-" for row, _ in pairs)
        eager = pairs[-1][1]
        lines.append(f"| {name} | {cell(eager, eager)} | {cells} | {counts} | {errors} | {noise_of(eager):.0e} |")
    starts = {"first": "first start", "second": "restart, sampling at once", "carried": "empty machine, cache file"}
    lines += ["", f"| model, seconds of compiling | {' | '.join(starts.values())} |", "|---" * 4 + "|"]
    restarts, _ = rows("cpu_restart")
    for model, name in SMALL.items():
        here = [newest(restarts, model=model, run=run) for run in starts]
        lines.append(f"| {name} | {' | '.join(_compile_seconds(row, here[0]) for row in here)} |")
    return "\n".join([*lines, "", _cancel_sentence(), "", *sources])


def _cancel_sentence() -> str:
    found, _ = rows("cpu_cancel")
    found = [row for row in found if row["file"] == found[-1]["file"]]
    cancels, after = [row for row in found if "after_the_graph" in row], found[-1]
    longest = max(row["after_the_graph"] for row in cancels)
    return (
        f"Cancel: {len(cancels)} warmups of three sizes (tiny Flux, real server) were cancelled inside a graph; they were over "
        f"at most {longest:.2f} s after the end of that graph. The run after them compiled what was left, {after['graphs']} of "
        f"the graphs, and its latent is {after['error']:.0e} from eager's."
    )


def _compile_seconds(row: dict, first: dict) -> str:
    ratio = f" ({row['compile_seconds'] / first['compile_seconds']:.2f})" if row is not first else ""
    return f"{row['compile_seconds']:.1f}{ratio}"
