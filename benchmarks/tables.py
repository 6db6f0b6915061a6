"""Regenerate the README's tables and chart from benchmarks/results/*.json: python -m benchmarks.tables"""

import json
from pathlib import Path

from . import chart

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "flux": "Flux-dev 12B, 1024x1024",
    "flux_fp8": "Flux-dev 12B, fp8 weights",
    "flux_fp8_scaled": "Flux-dev 12B, scaled fp8",
    "qwen_image": "Qwen-Image 20B, 1328x1328",
    "wan14": "Wan 2.1 14B, 832x480x33",
    "hunyuan_video": "HunyuanVideo 13B, 848x480x33",
    "z_image": "Z-Image 6B, 1024x1024",
    "sdxl": "SDXL, 1024x1024, cfg 5",
    "sd15": "SD 1.5, 512x512, cfg 5, `only_blocks` = `*`",
}
SMALL = {"flux_small": "a small Flux, 256x256", "sdxl_small": "a small SDXL, 256x256, cfg 5"}
PEERS = ("core", "kjnodes")


# Ways of holding the weights (kind of VRAM management, GiB free).
HOLDING = {
    ("legacy", 0.0): "dynamic VRAM off",
    ("dynamic", 0.0): "dynamic VRAM",
    ("dynamic", 14.0): "dynamic VRAM, 14 GiB free",
}
STARTS = {
    "first": "first start, nothing on disk",
    "second": "restart",
    "early": "restart, 5 s of text encoding between node and sampler",
    "carried": "empty cache, a file in Load Compile Cache",
    "carried early": "the same, 5 s of text encoding between node and sampler",
}


def rows(kind: str) -> tuple[list[dict], list[str]]:
    """All rows of a kind, the newest file last, each with its `file`, and lines that say where they come from."""
    found, sources = [], {}
    for file in sorted(RESULTS.glob("*.json"), key=lambda file: file.stem):
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            continue
        of_kind = [{**row, "file": file.name} for row in content.get("rows", []) if row["kind"] == kind]
        if of_kind:
            where = content["environments"][-1]
            on = f"{where['device']}, ComfyUI {where['comfyui']}, PyTorch {where['torch']}, {where['date']}"
            sources.setdefault(on, []).append(f"`benchmarks/results/{file.name}`")
            found += of_kind
    return found, [", ".join([on, *files]) for on, files in sources.items()]


def _cell(row: dict | None, eager: dict | None) -> str:
    if row is None:
        return "-"
    if "died" in row:
        return row["died"] if row["died"].startswith("no result") else "dies: " + row["died"].partition(":")[0]
    ratio = f" ({_ratio(row, eager)})" if eager and row is not eager else ""
    return f"{row['step']:.4g}{ratio}"


def _ratio(row: dict | None, eager: dict | None) -> str:
    return f"{row['step'] / eager['step']:.2f}" if row and eager and "step" in row and "step" in eager else "-"


def _error(row: dict | None) -> str:
    return f"{row['error']:.4f}" if row and "error" in row else "-"


def _noise(row: dict | None) -> float | None:
    """The largest error of eager with another attention kernel; older files have none."""
    return max(row["attention_noise"].values()) if row and row.get("attention_noise") else None


def _newest(found: list[dict], **wanted) -> dict | None:
    """The last row that has these values; a tuple stands for any of its own."""
    for row in reversed(found):
        if all(row.get(k) in v if isinstance(v, tuple) else row.get(k) == v for k, v in wanted.items()):
            return row
    return None


# Measured as a setting of its own, the default since: in CUDA graphs blocks of convolutions stay uncompiled.
TODAY = {"sdxl": ("ours", "ours, transformers")}


def _newest_pair(found: list[dict], model: str) -> tuple[dict | None, dict | None]:
    """(eager, ours) of the process that ran last."""
    ours = _newest(found, model=model, variant=TODAY.get(model, "ours"))
    if ours is None or "died" in ours:
        return None, None
    return _newest(found, model=model, variant="eager", file=ours["file"], process=ours.get("process")), ours


def _beside_peers(found: list[dict], model: str) -> list[dict | None]:
    """Eager, core, KJNodes and ours of the file that has the peers' rows; nothing if there is none."""
    peers = [row for variant in PEERS if (row := _newest(found, model=model, variant=variant))]
    return [_newest(found, model=model, variant=v, file=peers[0]["file"]) for v in ("eager", *PEERS, "ours")] if peers else []


def step_time_table() -> str:
    """A line a model: eager and ours of the newest file; peers and ours against the eager of the peers' own file."""
    found, sources = rows("step_time")
    lines = [
        "| model | eager | ours | cold start, s | graphs | peak VRAM, GiB: eager, ours | beside peers: core, KJNodes, ours "
        "| error: core, KJNodes, ours | noise |",
        "|---" * 9 + "|",
    ]
    for model, name in NAMES.items():
        eager, ours = _newest_pair(found, model)
        if ours is None:
            continue
        known = _beside_peers(found, model)
        beside = ", ".join(_ratio(row, known[0]) for row in known[1:]) or "-"
        cold = f"{ours['cold_start']:.1f}" if ours.get("head_start") else "-"
        peaks = ", ".join(f"{row.get('peak_gib', 0):.1f}" for row in (eager, ours) if row)
        errors = ", ".join(_error(row) for row in (*(known[1:3] or (None, None)), ours))
        noise = "-" if _noise(eager) is None else f"{_noise(eager):.4f}"
        lines.append(
            f"| {name} | {_cell(eager, eager)} | **{_cell(ours, eager)}** | {cold} | {ours['graphs']} | {peaks} | {beside} "
            f"| {errors} | {noise} |"
        )
    return "\n".join([*lines, "", *sources])


def step_time_chart() -> str:
    """The ratios to eager of the same rows, as an SVG; those beside peers where there are any."""
    found, _ = rows("step_time")
    groups = []
    for model, name in NAMES.items():
        eager, ours = _newest_pair(found, model)
        known = _beside_peers(found, model) or [eager, None, None, ours]
        ratios = [row["step"] / known[0]["step"] if row and "step" in row else None for row in known[1:]]
        if ours:
            title, detail = name.partition(", `")[0].split(", ", 1)
            groups.append((title, detail, dict(zip(chart.SERIES, ratios, strict=True))))
    return chart.draw(groups)


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
            row = _newest(found, model=model, variant=variant)
            eager = row and _newest(found, model=model, variant="eager", file=row["file"], process=row["process"])
            pairs.append((row, eager))
        cells = " | ".join(_cell(row, eager) for row, eager in pairs)
        counts = ", ".join(f"{row['graphs']}/{row['breaks']}" if row else "-" for row, _ in pairs)
        errors = ", ".join(f"{row['error']:.0e}" if row else "-" for row, _ in pairs)
        eager = pairs[-1][1]
        lines.append(f"| {name} | {_cell(eager, eager)} | {cells} | {counts} | {errors} | {_noise(eager):.0e} |")
    starts = {"first": "first start", "second": "restart", "carried": "empty machine, cache file"}
    lines += ["", f"| model, seconds of compiling | {' | '.join(starts.values())} |", "|---" * 4 + "|"]
    restarts, _ = rows("cpu_restart")
    for model, name in SMALL.items():
        here = [_newest(restarts, model=model, run=run) for run in starts]
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


def lora_table() -> str:
    found, sources = rows("lora")
    states = list(dict.fromkeys(row["state"] for row in found if "ours_step" in row))
    lines = ["| LoRA | " + " | ".join(HOLDING.values()) + " | graphs compiled |", "|---" * (len(HOLDING) + 2) + "|"]
    for state in states:
        here = [_newest(found, state=state, vram=vram, free_gib=free) for vram, free in HOLDING]
        cells = [f"{r['ours_step']:.4g} ({r['ours_step'] / r['eager_step']:.2f})" if r else "-" for r in here]
        lines.append(f"| {state} | {' | '.join(cells)} | {sum(r['graphs'] for r in here if r)} |")
    return "\n".join([*lines, "", *sources])


def restart_table() -> str:
    found, sources = rows("restart")
    head = ["start", "first step above a warm one, s", "of this compiling", "graphs", "of these read from disk"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for run, name in STARTS.items():
        row = _newest(found, run=run)
        if row:
            seconds = _compile_seconds(row, _newest(found, run="first"))
            lines.append(f"| {name} | {row['above']:.1f} | {seconds} | {row['graphs']} | {row['graphs_from_disk']} |")
    return "\n".join([*lines, "", *sources])


def low_vram_table() -> str:
    found, sources = rows("low_vram")
    labels = ["eager", "core", "kjnodes", "ours, same attention", "ours"]
    lines = ["| free VRAM | " + " | ".join(labels) + " | graphs, breaks: KJNodes | ours |", "|---" * 8 + "|"]
    for vram in ("dynamic", "legacy"):
        amounts = sorted({r["free_gib"] for r in found if r["vram"] == vram}, key=lambda f: -f or -1e9)
        for free in amounts:
            here = {r["variant"]: r for r in found if r["vram"] == vram and r["free_gib"] == free}
            eager = here.get("eager")
            cells = [_cell(here.get(label), eager) for label in labels]
            counts = [
                f"{r.get('graphs', '-')}, {r.get('breaks', '-')}" if (r := here.get(label)) else "-"
                for label in ("kjnodes", "ours")
            ]
            title = f"{'all' if not free else f'{free:g} GiB'}{', partial loading' if vram == 'legacy' else ''}"
            lines.append(f"| {title} | " + " | ".join([*cells, *counts]) + " |")
    return "\n".join([*lines, "", *sources])


def compatibility_table() -> str:
    outcomes = json.loads((RESULTS / "compatibility.json").read_text())
    head = ["set-up", "blocks", "share of weights", "block kinds", "graphs", "more for other shapes", "largest difference"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for o in outcomes:
        classes = ", ".join(f"{n} {c}" for c, n in o["classes"].items())
        note = f"; eager: {', '.join(o['eager'])}" if o["eager"] else ""
        note += f"; {o['breaks']} graph breaks" if o["breaks"] else ""
        counts = f"{o['kinds']} | {o['graphs']} | {o['graphs_after']} | {o['error']:.0e}"
        lines.append(f"| {o['name']} | {classes}{note} | {o['share']:.0%} | {counts} |")
    return "\n".join(lines)


COMPATIBILITY = """# Compatibility

Set-ups of `tests/zoo`: the host's architectures, tiny and with random weights, compiled block by block (tracing backend, fp32,
`dynamic` = auto) and compared with eager by `tests/test_sweep.py`. Other shapes: two more sizes, another prompt length, batches
of 1 and 3; all of them once more added no graph (but for hunyuan3d_v21, whose experts are counted by value). Where the numbers
exceed the kinds, `tests/test_sweep.py` says why. `python tests/sweep.py` runs the rest of the zoo too.

"""


def replace(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


TABLES = {
    "step time": step_time_table,
    "low vram": low_vram_table,
    "lora": lora_table,
    "restart": restart_table,
    "cpu": cpu_table,
}


def made() -> dict[Path, str]:
    """Every file with figures, and what it must hold."""
    text = (ROOT / "README.md").read_text()
    for name, table in TABLES.items():
        text = replace(text, name, table())
    return {
        ROOT / "README.md": text,
        ROOT / "docs" / "step-time.svg": step_time_chart(),
        ROOT / "docs" / "compatibility.md": COMPATIBILITY + compatibility_table() + "\n",
    }


if __name__ == "__main__":
    for file, content in made().items():
        file.write_text(content)
