"""Regenerate the README's tables from benchmarks/results/*.json: python -m benchmarks.tables"""

import json
from pathlib import Path

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


def _newest(found: list[dict], **wanted) -> dict | None:
    """The last row that has these values."""
    return next((row for row in reversed(found) if all(row.get(k) == v for k, v in wanted.items())), None)


# Measured as a setting of its own, the default since: in CUDA graphs blocks of convolutions stay uncompiled.
TODAY = {"sdxl": "ours, transformers"}


def step_time_table() -> str:
    """A line a model: eager and ours of the newest file; peers and ours against the eager of the peers' own file."""
    found, sources = rows("step_time")
    lines = [
        "| model | eager | ours | cold start, s | graphs | peak VRAM, GiB: eager, ours | beside peers: core, KJNodes, ours "
        "| error: core, KJNodes, ours |",
        "|---" * 8 + "|",
    ]
    for model, name in NAMES.items():
        ours = _newest(found, model=model, variant=TODAY.get(model, "ours"))
        if ours is None or "died" in ours:
            continue
        eager = _newest(found, model=model, variant="eager", file=ours["file"], process=ours.get("process"))
        peers = [_newest(found, model=model, variant=variant) for variant in ("core", "kjnodes")]
        beside = "-"
        if any(peers):
            file = next(peer["file"] for peer in peers if peer)
            known = [_newest(found, model=model, variant=v, file=file) for v in ("eager", "core", "kjnodes", "ours")]
            beside = ", ".join(_ratio(row, known[0]) for row in known[1:])
        cold = f"{ours['cold_start']:.1f}" if ours.get("head_start") else "-"
        peaks = ", ".join(f"{row.get('peak_gib', 0):.1f}" for row in (eager, ours) if row)
        errors = ", ".join(_error(row) for row in (*peers, ours))
        lines.append(
            f"| {name} | {_cell(eager, eager)} | **{_cell(ours, eager)}** | {cold} | {ours['graphs']} | {peaks} | {beside} "
            f"| {errors} |"
        )
    return "\n".join([*lines, "", *sources])


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
    lines = ["| start | first step above a warm one, s | graphs | of these read from disk |", "|---|---|---|---|"]
    for run, name in STARTS.items():
        row = _newest(found, run=run)
        if row:
            lines.append(f"| {name} | {row['above']:.1f} | {row['graphs']} | {row['graphs_from_disk']} |")
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


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    text = replace(text, "step time", step_time_table())
    text = replace(text, "low vram", low_vram_table())
    text = replace(text, "lora", lora_table())
    text = replace(text, "restart", restart_table())
    readme.write_text(text)
    if (RESULTS / "compatibility.json").exists():
        (ROOT / "docs" / "compatibility.md").write_text(COMPATIBILITY + compatibility_table() + "\n")


if __name__ == "__main__":
    main()
