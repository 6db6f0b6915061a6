"""Regenerate the README's tables from benchmarks/results/*.json: python -m benchmarks.tables"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "flux": "Flux-dev 12B, 1024x1024",
    "qwen_image": "Qwen-Image 20B, 1328x1328",
    "wan14": "Wan 2.1 14B, 832x480x33",
    "z_image": "Z-Image 6B, 1024x1024",
    "sdxl": "SDXL, 1024x1024, cfg 5",
    "sd15": "SD 1.5, 512x512, cfg 5",
}


def rows(kind: str) -> tuple[list[dict], list[str]]:
    """All rows of a kind, the newest file last, and where they come from."""
    found, sources = [], []
    for file in sorted(RESULTS.glob("*.json")):
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            continue
        of_kind = [row for row in content.get("rows", []) if row["kind"] == kind]
        if of_kind:
            where = content["environments"][-1]
            sources.append(
                f"{where['device']}, ComfyUI {where['comfyui']}, PyTorch {where['torch']}, {where['date']}, "
                f"`benchmarks/results/{file.name}`"
            )
            found += of_kind
    return found, sources


def _cell(row: dict | None, eager: dict | None) -> str:
    if row is None:
        return "-"
    if "died" in row:
        return "dies: " + row["died"].partition(":")[0]
    ratio = f" ({row['step'] / eager['step']:.2f})" if eager and row is not eager else ""
    return f"{row['step']:.4g}{ratio}"


def step_time_table() -> str:
    found, sources = rows("step_time")
    table = {(row["model"], row["variant"]): row for row in found}
    lines = [
        "| model | eager | core node | KJNodes | ours | graphs | peak VRAM, GiB: eager, ours | error: core, KJNodes, ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, name in NAMES.items():
        eager, core, kjnodes, ours = (table.get((model, v)) for v in ("eager", "core", "kjnodes", "ours"))
        if ours is None or "died" in ours:
            continue
        errors = ", ".join(f"{r['error']:.4f}" if r and "error" in r else "-" for r in (core, kjnodes, ours))
        peaks = ", ".join(f"{r.get('peak_gib', 0):.1f}" for r in (eager, ours) if r)
        best = f"**{_cell(ours, eager)}**"
        lines.append(
            f"| {name} | {_cell(eager, eager)} | {_cell(core, eager)} | {_cell(kjnodes, eager)} | {best} | {ours['graphs']} "
            f"| {peaks} | {errors} |"
        )
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
    readme.write_text(text)
    if (RESULTS / "compatibility.json").exists():
        (ROOT / "docs" / "compatibility.md").write_text(COMPATIBILITY + compatibility_table() + "\n")


if __name__ == "__main__":
    main()
