"""The tables of what is not the plain denoiser: packed weights (GGUF), VAEs."""

from .rows import NAMES, cell, newest, rows

VAES = {
    "flux": "Flux, 1024x1024", "sdxl": "SDXL, 1024x1024", "qwen": "Qwen-Image, 1328x1328", "wan": "Wan 2.1, 832x480x33",
    "ltx": "LTX, 768x512x97", "hunyuan": "HunyuanVideo, 832x480x33",
}  # fmt: skip
KEPT = {True: "channels last", False: "as it was", None: "not decided in 8 calls"}


def gguf_table() -> str:
    """A line a packing: each variant against the eager steps of its own process."""
    found, sources = rows("gguf")
    lines = [
        "| seconds per step | packing | eager | KJNodes | ours | graphs, breaks | error: KJNodes, ours |",
        "|---" * 7 + "|",
    ]
    for model, packing in sorted({(row["model"], row["packing"]) for row in found}):
        cells, errors, graphs = {}, [], "-"
        for variant in ("kjnodes", "ours"):
            row = newest(found, model=model, packing=packing, variant=variant)
            eager = row and newest(found, model=model, packing=packing, variant="eager", run=row["run"])
            cells[variant] = cell(row, eager)
            errors.append(f"{row['error']:.4f}" if row else "-")
            if variant == "ours" and row:
                cells["eager"], graphs = cell(eager, eager), f"{row['graphs']}, {row['breaks']}"
        lines.append(
            f"| {NAMES[model]} | {packing} | {cells['eager']} | {cells['kjnodes']} | **{cells['ours']}** | {graphs} "
            f"| {', '.join(errors)} |"
        )
    return "\n".join([*lines, "", *sources])


def _share(row: dict | None, eager: dict | None) -> str:
    return f"{row['seconds']:.3f} ({row['seconds'] / eager['seconds']:.2f})" if row and eager else "-"


def vae_table() -> str:
    """A line a VAE: seconds of a decode, each against eager's of the same file."""
    found, sources = rows("vae")
    lines = [
        "| seconds to decode | eager | channels last, by itself | compiled whole, its first | with the node | it keeps |",
        "|---" * 6 + "|",
    ]
    for model, name in VAES.items():
        taken = {v: newest(found, model=model, variant=v) for v in ("eager", "channels_last", "compiled", "ours")}
        eager = {row["file"]: row for row in found if row["model"] == model and row["variant"] == "eager"}
        shares = {v: _share(row, row and eager[row["file"]]) for v, row in taken.items()}
        compiled, ours = taken["compiled"], taken["ours"]
        first = f"{shares['compiled']}, {compiled['first']:.0f}" if compiled else "-"
        keeps = KEPT[ours["channels_last"]["decode"]] if ours else "-"
        lines.append(
            f"| {name} | {taken['eager']['seconds']:.3f} | {shares['channels_last']} | {first} | {shares['ours']} | {keeps} |"
        )
    return "\n".join([*lines, "", *sources])
