"""Regenerate all that shows figures from benchmarks/results/*.json: python -m benchmarks.tables"""

import json
from pathlib import Path

from . import chart, details, part_tables, session_tables
from .rows import NAMES, PEERS, RESULTS, ROOT, cell, error_of, newest, noise_of, number, ratio, rows


def _newest_pair(found: list[dict], model: str) -> tuple[dict | None, dict | None]:
    """(eager, ours) of the process that ran last."""
    ours = newest(found, model=model, variant="ours")
    if ours is None or "died" in ours:
        return None, None
    return newest(found, model=model, variant="eager", file=ours["file"], process=ours.get("process")), ours


def _beside_peers(found: list[dict], model: str) -> dict[str, tuple[dict, dict | None]]:
    """Peer -> its newest row, and the last eager one of the same file."""
    rows_of = {peer: newest(found, model=model, variant=peer) for peer in PEERS}
    return {peer: (row, newest(found, model=model, variant="eager", file=row["file"])) for peer, row in rows_of.items() if row}


def step_time_table() -> str:
    """A line a model: eager and ours of the newest process, each peer against the eager of its own file."""
    found, sources = rows("step_time")
    lines = [
        "| model | eager | ours | KJNodes | core | cold start, s: ours, KJNodes | graphs | peak VRAM, GiB: eager, ours "
        "| error: ours, KJNodes, core | noise |",
        "|---" * 10 + "|",
    ]
    for model, name in NAMES.items():
        eager, ours = _newest_pair(found, model)
        if ours is None:
            continue
        peers = _beside_peers(found, model)
        ratios = [ratio(*peers.get(peer, (None, None))) for peer in reversed(PEERS)]
        cold = f"{ours['cold_start']:.1f}" if ours.get("head_start") else "-"
        other = peers.get("kjnodes", ({},))[0].get("cold_start")
        peaks = ", ".join(f"{row.get('peak_gib', 0):.1f}" for row in (eager, ours) if row)
        errors = ", ".join(error_of(row) for row in (ours, *(peers.get(peer, (None,))[0] for peer in reversed(PEERS))))
        noises = [noise_of(row) for row in found if row["model"] == model and noise_of(row) is not None]
        noise = f"{noises[-1]:.4f}" if noises else "-"
        lines.append(
            f"| {name} | {cell(eager, eager)} | **{cell(ours, eager)}** | {' | '.join(ratios)} "
            f"| {cold}, {'-' if other is None else f'{other:.1f}'} | {ours['graphs']} | {peaks} | {errors} | {noise} |"
        )
    return "\n".join([*lines, "", *sources])


def step_time_chart() -> str:
    """The ratios to eager of the same rows, as an SVG."""
    found, _ = rows("step_time")
    groups = []
    for model, name in NAMES.items():
        eager, ours = _newest_pair(found, model)
        if ours is None:
            continue
        pairs = {**_beside_peers(found, model), "ours": (ours, eager)}
        ratios = [number(*pairs[v]) if v in pairs else None for v in (*PEERS, "ours")]
        title, detail = name.partition(", `")[0].split(", ", 1)
        groups.append((title, detail, dict(zip(chart.SERIES, ratios, strict=True))))
    return chart.draw(groups)


def low_vram_table() -> str:
    found, sources = rows("low_vram")
    labels = ["eager", "core", "kjnodes", "ours, same attention", "ours"]
    lines = ["| free VRAM | " + " | ".join(labels) + " | graphs, breaks: KJNodes | ours |", "|---" * 8 + "|"]
    for vram in ("dynamic", "legacy"):
        amounts = sorted({r["free_gib"] for r in found if r["vram"] == vram}, key=lambda f: -f or -1e9)
        for free in amounts:
            here = {r["variant"]: r for r in found if r["vram"] == vram and r["free_gib"] == free}
            eager = here.get("eager")
            cells = [cell(here.get(label), eager) for label in labels]
            counts = [
                f"{r.get('graphs', '-')}, {r.get('breaks', '-')}" if (r := here.get(label)) else "-"
                for label in ("kjnodes", "ours")
            ]
            title = f"{'all' if not free else f'{free:g} GiB'}{', partial loading' if vram == 'legacy' else ''}"
            lines.append(f"| {title} | " + " | ".join([*cells, *counts]) + " |")
    return "\n".join([*lines, "", *sources])


def outcomes() -> list[dict]:
    """The rows of `tests/sweep.py`, one a set-up."""
    return json.loads((RESULTS / "compatibility.json").read_text())


def keeps_promise(outcome: dict) -> bool:
    """One graph a block group at the first shape, one more for all others, none again, no breaks, nothing eager."""
    first, after, groups = outcome["graphs"], outcome["graphs_after"], outcome["groups"]
    whole = not outcome["breaks"] and not outcome["eager"] and not outcome["graphs_again"]
    return whole and 0 < first <= groups and after <= groups


def compatibility_table() -> str:
    head = ["set-up", "blocks", "share of weights", "block groups", "graphs", "more for other shapes", "largest difference"]
    head.append("ComfyUI, PyTorch")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for o in outcomes():
        classes = _counted(o["classes"])
        note = f"; eager: {', '.join(o['eager'])}" if o["eager"] else ""
        note += f"; eager, as little is to be saved: {_counted(o['left_out'])}" if o.get("left_out") else ""
        note += f"; compiled inside them: {_counted(o['parts'])}" if o.get("parts") else ""
        note += f"; not called: {', '.join(o['idle'])}" if o["idle"] else ""
        note += f"; {o['breaks']} graph breaks" if o["breaks"] else ""
        counts = f"{o['groups']} | {o['graphs']} | {o['graphs_after']} | {o['error']:.0e} | {o['host']}, {o['torch']}"
        lines.append(f"| {o['name']} | {classes}{note} | {o['share']:.0%} | {counts} |")
    return "\n".join(lines)


def _counted(classes: dict[str, int]) -> str:
    return ", ".join(f"{n} {c}" for c, n in classes.items())


def matrix_table() -> str:
    """A line for each ComfyUI and PyTorch that tests ran on, newest first, from what `dev.py matrix` kept."""
    lines = ["| ComfyUI | PyTorch | tests | passed | failed | skipped or off, and why | run |", "|---" * 7 + "|"]
    for run in json.loads((RESULTS / "compatibility-matrix.json").read_text())["runs"]:
        skipped = [f"{count}: {reason}" for reason, count in run["skipped"].items()]
        off = [f"off: {what}" for what in run["left_out"]]
        where = f"{run['date']}, Python {run['python']}, {run['device']}"
        why = "; ".join([*skipped, *off]).replace("|", "\\|") or "none"
        counts = f"{run['passed']} | {len(run['failed'])}"
        lines.append(f"| {run['comfyui']} | {run['torch']} | {PARTS[run['part']]} | {counts} | {why} | {where} |")
    return "\n".join(lines)


# Set-ups that do not keep the promise, and why.
EXCEPTIONS = {
    "hunyuan3d_v21": "experts counted by value, a few graphs more each time",
    "seedvr2": "sizes taken from tensors; runs eager",
    "minimax_music3": "on a CPU ComfyUI gives it attention that reads the free memory; not measured on a GPU",
    "trellis2_shape": "sizes taken from the voxels, so that it is compiled in pieces, with variants for each set of voxels",
    "wan_animate2": "calls its blocks by other methods than `forward`; runs eager, as the report says",
}

COMPATIBILITY = """# Compatibility

{matrix}

## Models
{count} set-ups of `tests/zoo`: the host's architectures, tiny and with random weights, compiled block by block (tracing
backend, fp32, `dynamic` = auto) and compared with eager by `tests/host/test_sweep.py`. Other shapes: two more sizes, another
prompt length, batches of 1 and 3. The promise is one graph a group at the first shape, one more for all others, none when all
of them come again, and no breaks. {kept} keep it; the others are

{exceptions}

Blocks that are "not called" are for other inputs, or run once before the sampling.
`python tests/sweep.py --host COMFYUI` runs these and their near twins.

"""


def compatibility() -> str:
    rows_ = outcomes()
    broken = [f"- {o['name']}: {EXCEPTIONS[o['name']]}" for o in rows_ if not keeps_promise(o)]
    kept, exceptions = len(rows_) - len(broken), "\n".join(broken)
    text = COMPATIBILITY.format(matrix=matrix_table(), count=len(rows_), kept=kept, exceptions=exceptions)
    return text + compatibility_table() + "\n"


def replace(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    around = "" if name in INLINE else "\n"
    return f"{before}{begin}{around}{table}{around}{end}{after}"


PARTS = {"whole": "whole suite", "core": "its core", "newest": "what newer versions can break"}
# In the middle of a line.
INLINE = {"set-ups": lambda: str(len(outcomes()))}
README = {"sessions": session_tables.sessions_table, "parts": part_tables.parts_table, **INLINE}
FIGURES = {
    "prompts": session_tables.prompts_table,
    "first minutes": session_tables.first_minutes_table,
    "low vram": low_vram_table,
    "step time": step_time_table,
    "kernels": details.kernels_table,
    "cold": details.cold_table,
    "graphs": details.graphs_table,
    "lora": details.lora_table,
    "restart": details.restart_table,
    "fusions": details.fusions_table,
    "controlnet": details.controlnet_table,
    "gguf": part_tables.gguf_table,
    "vae": part_tables.vae_table,
    "controlnet_node": part_tables.controlnet_node_table,
    "step_caches": part_tables.step_caches_table,
    "block_swap": part_tables.block_swap_table,
    "training": part_tables.training_table,
    "text_encoder": part_tables.text_encoder_table,
    "cpu": details.cpu_table,
}


def made() -> dict[Path, str]:
    """Every file with figures, and what it must hold."""
    texts = {}
    for file, tables in ((ROOT / "README.md", README), (ROOT / "docs" / "figures.md", FIGURES)):
        texts[file] = file.read_text()
        for name, table in tables.items():
            texts[file] = replace(texts[file], name, table())
    return {
        **texts,
        ROOT / "docs" / "step-time.svg": step_time_chart(),
        ROOT / "docs" / "compatibility.md": compatibility(),
    }


if __name__ == "__main__":
    for file, content in made().items():
        file.write_text(content)
