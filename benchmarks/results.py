"""Read and write results files, without PyTorch.

A command writes one run: {"environments": [...], "rows": [...]}. benchmarks/results/TABLE.json holds the runs that the table
shows, oldest first; `python -m benchmarks.tables --add FILE` puts a new run there. `formerly` is an old run's file in git.
"""

import json
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "flux": "Flux-dev 12B, 1024x1024",
    "qwen_image": "Qwen-Image 20B, 1328x1328",
    "wan14": "Wan 2.1 14B, 832x480x33",
    "z_image": "Z-Image 6B, 1024x1024",
    "klein": "Flux.2 klein 4B, 1024x1024",
    "wan22": "Wan 2.2 14B pair with a LoRA (12 of 40 blocks), 832x480x81",
    "qwen_edit": "Qwen-Image-Edit 20B with two references (20 of 60 blocks), 1024x1024",
    "sdxl": "SDXL, 1024x1024, cfg 5",
    "sdxl_refined": "SDXL and a second SDXL as its refiner, 1024x1024",
    "sdxl_lightning": "SDXL with a LoRA for 4 steps, 1024x1024",
    "sd15": "SD 1.5, 512x512, cfg 5",
}
# Model -> dtype of its weights in the default format; not read from models.py, which needs PyTorch.
PRECISIONS = {model: "fp16" if model.startswith("sd") else "bf16" for model in NAMES}
# Keys that each environment of a run must have.
PROVENANCE = ("date", "device", "torch", "python", "comfyui", "command")
# kind of a row -> the file that holds it
FILES = {"part": "parts", "prebuilt": "prebuilt", "session": "sessions", "soak": "soak", "table": "table"}


def rows(table: str, *kinds: str) -> tuple[list[dict], list[str]]:
    """Rows of these kinds in a table's file, newest last, and source lines: GPU, versions, date and file of each run.

    Returns:
        Each row with its device, its command and `source`, the position of its run in the file.
    """
    file = RESULTS / f"{table}.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    selected, sources = [], []
    for index, run in enumerate(runs):
        where = run["environments"][-1]
        run_of = {"source": index, "device": where["device"], "command": where.get("command", "")}
        of_kind = [{**row, **run_of} for row in run["rows"] if row["kind"] in kinds]
        if of_kind:
            selected += of_kind
            versions = f"ComfyUI {where['comfyui']}, PyTorch {where['torch']}"
            sources.append(f"{where['device']}, {versions}, {where['date']}, `benchmarks/results/{file.name}`")
    return selected, list(dict.fromkeys(sources))


def add(file: Path) -> list[str]:
    """Append the run in `file` to the results files of the tables that show its rows; returns the tables' names.

    Raises:
        ValueError: an environment of the run lacks a key of PROVENANCE.
    """
    run = json.loads(file.read_text(encoding="utf-8"))
    for where in run["environments"] or [{}]:
        if lacking := [key for key in PROVENANCE if key not in where]:
            raise ValueError(f"{file}: a run says its {', '.join(PROVENANCE)}; this one lacks {', '.join(lacking)}")
    by_table: dict[str, list[dict]] = {}
    for row in run["rows"]:
        if not row.get("model", "").endswith("_small"):  # no table shows small models
            by_table.setdefault(FILES[row["kind"]], []).append(row)
    for table, of_table in by_table.items():
        target = RESULTS / f"{table}.json"
        runs = json.loads(target.read_text(encoding="utf-8"))["runs"] if target.exists() else []
        save(target, {"runs": [*runs, {**run, "rows": of_table}]})
    return list(by_table)


def load(file: Path | None) -> dict:
    """The run in `file`, to which a benchmark adds rows; an empty run if there is no file."""
    return json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {"environments": [], "rows": []}


def save(file: Path, content: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def command(module: str) -> str:
    return " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]])


def cpu_name() -> str:
    """This machine's processor and how many cores it has."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name or 'CPU'}, {os.cpu_count()} cores"


def cell(row: dict | None, eager: dict | None) -> str:
    """Seconds per step, and the ratio to eager's."""
    if row is None:
        return "-"
    if "died" in row:
        return row["died"] if row["died"].startswith("no result") else "dies: " + row["died"].partition(":")[0]
    against = f" ({ratio(row, eager)})" if eager and row is not eager else ""
    return f"{row['step']:.4g}{against}"


def ratio(row: dict | None, eager: dict | None) -> str:
    return f"{row['step'] / eager['step']:.2f}" if row and eager and "step" in row and "step" in eager else "-"


def value_cell(row: dict | None, eager: dict, key: str, digits: int) -> str:
    """A value of a row and its ratio to eager's."""
    if row is None or key not in row:
        return "-" if row is None or "died" not in row else cell(row, None)
    against = f" ({row[key] / eager[key]:.2f})" if row is not eager and key in eager else ""
    return f"{row[key]:.{digits}f}{against}"


def noise_of(row: dict) -> float | None:
    """The largest error of eager with another attention kernel; None if the row has no `noise`."""
    return max(row["noise"].values()) if row.get("noise") else None


def newest(candidates: list[dict], **wanted) -> dict | None:
    """The last row with all of these values."""
    return next((row for row in reversed(candidates) if all(row.get(k) == v for k, v in wanted.items())), None)


def lines_of(head: list[str], lines: list[str], sources: list[str] = ()) -> str:
    """A Markdown table, followed by its source lines."""
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, *(["", *sources] if sources else [])])
