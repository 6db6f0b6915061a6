"""Make all that shows figures from benchmarks/results/*.json: tables of README and docs, the chart.

python -m benchmarks.tables               # write them
python -m benchmarks.tables --check       # write nothing; end with 1 and name the files that differ
python -m benchmarks.tables --add FILE    # put a run into the results files, then write
"""

import argparse
import json
import sys
from pathlib import Path

from . import chart, figure_tables, results, session_tables
from .results import RESULTS, ROOT, lines_of


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
    """A line for each ComfyUI and PyTorch that tests ran on, newest first, from what `dev.py matrix` kept."""
    lines = []
    for run in json.loads((RESULTS / "compatibility-matrix.json").read_text())["runs"]:
        skipped = [f"{count}: {reason}" for reason, count in run["skipped"].items()]
        off = [f"off: {what}" for what in run["left_out"]]
        where = f"{run['date']}, Python {run['python']}, {run['device']}"
        why = "; ".join([*skipped, *off]).replace("|", "\\|") or "none"
        counts = f"{run['passed']} | {len(run['failed'])}"
        lines.append(f"| {run['comfyui']} | {run['torch']} | {PARTS[run['part']]} | {counts} | {why} | {where} |")
    return lines_of(["ComfyUI", "PyTorch", "tests", "passed", "failed", "skipped or off, and why", "run"], lines)


# Set-ups that do not keep the promise, and why.
EXCEPTIONS = {
    "hunyuan3d_v21": "experts counted by value, a few graphs more each time",
    "z_image_omni": "sorts slices of tokens, so that it is compiled in pieces",
    "pixeldit": "loops over chunks of pixels; a graph for each size",
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
README = {
    "sessions": session_tables.sessions_table,
    "table": session_tables.short_table,
    "parts": figure_tables.parts_table,
    **INLINE,
}
FIGURES = {
    "table": session_tables.table_table,
    "prompts": session_tables.prompts_table,
    "first minutes": figure_tables.first_minutes_table,
    "formats": figure_tables.formats_table,
    "low vram": figure_tables.low_vram_table,
    "step time": figure_tables.step_time_table,
    "kernels": figure_tables.kernels_table,
    "cold": figure_tables.cold_table,
    "soak": figure_tables.soak_table,
    "lora": figure_tables.lora_table,
    "restart": figure_tables.restart_table,
    "fusions": figure_tables.fusions_table,
    "gguf": figure_tables.gguf_table,
    "vae": figure_tables.vae_table,
    "controlnet": figure_tables.controlnet_table,
    "step_caches": figure_tables.step_caches_table,
    "block_swap": figure_tables.block_swap_table,
    "training": figure_tables.training_table,
    "text_encoder": figure_tables.text_encoder_table,
    "cpu": figure_tables.cpu_table,
}


def made() -> dict[Path, str]:
    """Every file with figures, and what it must hold."""
    texts = {}
    for file, tables in ((ROOT / "README.md", README), (ROOT / "docs" / "figures.md", FIGURES)):
        texts[file] = file.read_text(encoding="utf-8")
        for name, table in tables.items():
            texts[file] = replace(texts[file], name, table())
    return {
        **texts,
        ROOT / "docs" / "step-time.svg": chart.draw(figure_tables.step_time_ratios()),
        ROOT / "docs" / "compatibility.md": compatibility(),
    }


def stale() -> list[str]:
    """The files, relative to the repository, that are not what the results files make."""
    return [str(f.relative_to(ROOT)) for f, content in made().items() if f.read_text(encoding="utf-8") != content]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a file is not what results make")
    parser.add_argument("--add", type=Path, metavar="FILE", help="a run, as the benchmarks write it")
    options = parser.parse_args()
    if options.check:
        for name in (names := stale()):
            print(f"{name} is not what benchmarks/results make; run: python -m benchmarks.tables")
        sys.exit(bool(names))
    if options.add:
        print("added to", ", ".join(f"{table}.json" for table in results.add(options.add)))
    for file, content in made().items():
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
