"""What the tables of figures are made from: the rows of benchmarks/results/*.json, and how they are written."""

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
    "sd15": "SD 1.5, 512x512, cfg 5",
}
SMALL = {"flux_small": "a small Flux, 256x256", "sdxl_small": "a small SDXL, 256x256, cfg 5"}
PEERS = ("core", "kjnodes")


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


def cell(row: dict | None, eager: dict | None) -> str:
    if row is None:
        return "-"
    if "died" in row:
        return row["died"] if row["died"].startswith("no result") else "dies: " + row["died"].partition(":")[0]
    against = f" ({ratio(row, eager)})" if eager and row is not eager else ""
    return f"{row['step']:.4g}{against}"


def number(row: dict | None, eager: dict | None) -> float | None:
    return row["step"] / eager["step"] if row and eager and "step" in row and "step" in eager else None


def ratio(row: dict | None, eager: dict | None) -> str:
    found = number(row, eager)
    return "-" if found is None else f"{found:.2f}"


def error_of(row: dict | None) -> str:
    return f"{row['error']:.4f}" if row and "error" in row else "-"


def noise_of(row: dict | None) -> float | None:
    """The largest error of eager with another attention kernel; older files have none."""
    return max(row["attention_noise"].values()) if row and row.get("attention_noise") else None


def newest(found: list[dict], **wanted) -> dict | None:
    """The last row that has these values."""
    return next((row for row in reversed(found) if all(row.get(k) == v for k, v in wanted.items())), None)
