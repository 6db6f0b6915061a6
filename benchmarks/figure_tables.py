"""Make the tables of soak.py, parts.py and prebuilt.py for docs/ from results files."""

from .results import NAMES, PRECISIONS, cell, lines_of, newest, ratio, rows

# Part of parts.py -> its name in tables, and what `step` times.
PARTS = {"vae": ("VAE", "a decode"), "controlnet": ("ControlNet", "a step"), "training": ("Train LoRA", "a step")}
# Part -> its node, and where the node does nothing.
OF_PARTS = {
    "vae": ("VAE Channels Last", "Qwen-Image, LTX and HunyuanVideo are left as they are"),
    "controlnet": ("Torch Compile ControlNet", "T2I adapters and Control LoRA are left as they are"),
    "training": ("Torch Compile", "offloaded weights train uncompiled"),
}
# Part -> the variant with all nodes of this pack for that part.
OURS = {"vae": "ours", "controlnet": "both", "training": "ours"}
NOT_MEASURED = "Not measured with this version."


def prebuilt_table() -> str:
    """One line per model: a server that compiles before the first image, beside a server with prebuild.py's cache file."""
    servers, sources = rows("prebuilt", "prebuilt")
    pairs: dict[tuple, dict[str, dict]] = {}
    for row in servers:
        if "step" in row:
            pairs.setdefault((row["source"], row["model"], row["weights"]), {})[row["code"]] = row
    lines = []
    for (_, model, weights), of in pairs.items():
        if len(of) < 2:
            continue
        there, built = of["made there"], of["prebuilt"]
        weights = PRECISIONS[model] if weights == "default" else f"{weights} fp8"
        both = [
            f"{there[key]:{digits}}, {built[key]:{digits}}"
            for key, digits in (("compiled", "d"), ("seconds", ".1f"), ("step", ".4f"))
        ]
        both += [str(built.get("used_after", "-")), f"{built['error']:.2g}"]
        card = built["device"].split()[1]
        lines.append(f"| {NAMES[model].partition(',')[0]}, {weights}, {card} | {' | '.join(both)} |")
    head = ["made there, prebuilt", "graphs compiled", "first image, s", "a step, s"]
    head += ["steps from the last trace until all ran compiled: prebuilt", "error between both"]
    return lines_of(head, lines, sources)


def soak_table() -> str:
    """One line per server of soak.py: errors of latents against eager's, and the memory that the server holds."""
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
    head = ["", "prompts", "wrong", "largest error", "two states differ by", "captured, replayed"]
    head += ["GiB of the GPU", "MiB of RAM"]
    return lines_of(head, lines, sources)


def _parts() -> tuple[dict[str, dict[str, dict]], list[str]]:
    """{set-up of parts.py: {variant: row}}, each from the newest run that has eager; and the source lines."""
    measured, sources = rows("parts", "part")
    by_set_up = {}
    for setup in dict.fromkeys(row["setup"] for row in measured):
        eager = newest(measured, setup=setup, variant="eager")
        if eager is not None and ("step" in eager or "died" in eager):
            of_run = [row for row in measured if (row["setup"], row["source"]) == (setup, eager["source"])]
            by_set_up[setup] = {row["variant"]: row for row in of_run if "step" in row or "died" in row}
    return by_set_up, sources


def parts_table() -> str:
    """One line per part and model: each variant's seconds of a step and ratio to eager's; further figures in the same order."""
    by_set_up, sources = _parts()
    lines = []
    for of in by_set_up.values():
        eager, ours = of["eager"], of.get(OURS[of["eager"]["part"]])
        name, timed = PARTS[eager["part"]]
        attention = f", uncompiled with {eager['attention']}" if "attention" in eager else ""
        what = f"{name}: {NAMES[eager['model']]}{attention}"
        cells = [cell(of.get(variant) if variant else ours, eager) for variant in ("eager", "kjnodes", "model", None)]
        of_row = [row for row in (eager, of.get("kjnodes"), of.get("model"), ours) if row]
        prompts, firsts, errors, gib = (
            ", ".join(f"{row[key]:{digits}}" if key in row else "-" for row in of_row)
            for key, digits in (("seconds", ".2f"), ("first", ".1f"), ("error", ".2g"), ("vram_gib", ".1f"))
        )
        lines.append(f"| {what} | {timed} | {' | '.join(cells)} | {prompts} | {firsts} | {errors} | {gib} |")
    head = ["", "seconds of", "uncompiled", "KJNodes", "Torch Compile alone", "with the part's node"]
    head += ["each of these: a prompt, s", "first, s", "error", "VRAM, GiB"]
    return lines_of(head, lines, sources) if lines else NOT_MEASURED


def short_parts_table() -> str:
    """For docs/figures.md: one line per part with our step's share of eager's time."""
    by_set_up, _ = _parts()
    lines = []
    for part, (node, does_not) in OF_PARTS.items():
        shares = [
            f"{NAMES[of['eager']['model']].partition(',')[0]} {ratio(of.get(OURS[part]), of['eager'])}"
            for of in by_set_up.values()
            if of["eager"]["part"] == part
        ]
        name, timed = PARTS[part]
        gained = f"{timed}: {', '.join(shares)}" if shares else "not measured with this version"
        lines.append(f"| {name} | {node} | {gained} | {does_not} |")
    head = ["part", "with", "share of the uncompiled time", "does not"]
    return lines_of(head, lines) if by_set_up else NOT_MEASURED
