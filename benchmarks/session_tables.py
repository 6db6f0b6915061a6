"""Make the tables of what a person waits for, from the rows of kind `session` (sessions.py) and `table` (table.py)."""

import math
import re
import statistics
from collections.abc import Iterable

from .results import NAMES, PRECISIONS, cell, lines_of, newest, noise_of, rows, value_cell
from .sessions import SESSIONS
from .table import SETUPS, STEPS, Setup
from .table import VARIANTS as PEERS_AND_OURS

VARIANTS = {
    "eager": "eager",
    "kjnodes": "KJNodes",
    "kjnodes_static": "KJNodes, VRAM static",
    "core": "core",
    "ours": "ours",
    "ours_static": "ours, VRAM static",
    "warmup": "ours, with Warmup",
}
CACHES = ("cold", "warm")
RESTARTS = {prompt.name for session in SESSIONS.values() for prompt in session.prompts if prompt.restart}
FORMATS = {
    "int8": "INT8 ConvRot", "scaled": "scaled fp8", "fp8_e4m3fn_fast": "`fp8_e4m3fn_fast`", "gguf": "GGUF Q4_K",
}  # fmt: skip
OPTIONS = {
    "sage": "`--use-sage-attention`",
    "flash": "`--use-flash-attention`",
    "fast": "`--fast fp16_accumulation`",
    "easycache": "EasyCache",
}
# A user notices a step that takes longer than so many of eager's.
NOTICED = 3


class Sessions:
    """Sessions by (model and weights, GiB free, cores, variant, cache): the newest, and eager's of the same run."""

    def __init__(self, prompts: list[dict]):
        self.newest: dict[tuple, dict[int, dict]] = {}
        self._by_run: dict[tuple, dict[int, dict]] = {}
        for row in prompts:
            model = " ".join((row["model"], *([row["weights"]] if "weights" in row else [])))
            key = (model, row["free_gib"], row["cores"], row["variant"], row["cache"])
            self.newest[key] = self._by_run.setdefault((row["source"], *key), {})
            self.newest[key][row["number"]] = row

    def set_ups(self) -> list[tuple[str, float]]:
        """(model, GiB free) of sessions with a variant beside eager, in the order of NAMES, all memory first."""
        held = {key[:2] for key in self.newest if key[0].partition(" ")[0] in NAMES and key[3] != "eager"}
        return sorted(held, key=lambda s: (list(NAMES).index(s[0].partition(" ")[0]), s[0], -s[1] if s[1] else float("-inf")))

    def eager(self, key: tuple) -> dict[int, dict]:
        """Eager's session of the same run, so of the same machine, as number -> row; empty where there is none."""
        model, free, cores, *_ = key
        own = self.newest.get(key)
        return self._by_run.get((next(iter(own.values()))["source"], model, free, cores, "eager", "cold"), {}) if own else {}


def _cell(taken: list[dict], eager: list[dict]) -> str:
    """The sum of the prompts' seconds, and its ratio to that of eager's same prompts."""
    if not taken or None in taken:
        return "-"
    if dead := [row for row in taken if "died" in row]:
        return cell(dead[0], None)
    seconds = sum(row["seconds"] for row in taken)
    if not eager or None in eager or any("died" in row for row in eager) or taken == eager:
        return f"{seconds:.1f}"
    return f"{seconds:.1f} ({seconds / sum(row['seconds'] for row in eager):.2f})"


def _figures(sessions: Sessions, key: tuple, last: int) -> list[str]:
    """First prompt, whole session, and the last prompt before a restart."""
    own, eager = sessions.newest.get(key, {}), sessions.eager(key)
    numbers = sorted(own) or [1]
    settled = next((number - 1 for number in numbers if own and own[number]["prompt"] in RESTARTS), last)
    first, whole, compiled = (
        _cell([own.get(n) for n in some], [eager.get(n) for n in some]) for some in ([1], numbers, [settled])
    )
    return [first, whole if len(numbers) == last or whole == "-" else f"{whole}, {len(numbers)} prompts", compiled]


def _title(model: str, free: float) -> str:
    name, _, weights = model.partition(" ")
    return ", ".join((NAMES[name], *([FORMATS[weights]] if weights else []), *([f"{free:g} GiB free"] if free else [])))


def sessions_table() -> str:
    """One line per model and variant: first image, the session cold and warm, and the last prompt."""
    prompts, sources = rows("sessions", "session")
    sessions = Sessions(prompts)
    if not sessions.set_ups():
        return ""
    columns = ["model", "", "first image", "session, cold", "session, warm", "once compiled"]
    lines = []
    for model, free in sessions.set_ups():
        last = max(n for key, held in sessions.newest.items() if key[:2] == (model, free) for n in held)
        for variant, name in VARIANTS.items():
            if not any(key[:2] == (model, free) and key[3] == variant for key in sessions.newest):
                continue
            first, cold, compiled = _figures(sessions, (model, free, 0, variant, "cold"), last)
            _, warm, _ = _figures(sessions, (model, free, 0, variant, "warm"), last)
            title = f"{_title(model, free)}, {last} prompts" if variant == "eager" else ""
            lines.append(f"| {title} | {name} | {first} | {cold} | {warm} | {compiled} |")
    return lines_of(columns, lines, sources)


def prompts_table() -> str:
    """For each session a table of its prompts: seconds, ratio to eager's and the longest step, of every variant."""
    prompts, sources = rows("sessions", "session")
    sessions = Sessions(prompts)
    parts = []
    for model, free in sessions.set_ups():
        for cores in sorted({key[2] for key in sessions.newest if key[:2] == (model, free)}):
            keys = [(model, free, cores, variant, cache) for variant in VARIANTS for cache in CACHES]
            keys = [key for key in keys if key in sessions.newest]
            title = _title(model, free) + (f", {cores} cores" if cores else "")
            heads = [f"{VARIANTS[key[3]]}{'' if key[3] == 'eager' else ', ' + key[4]}" for key in keys]
            lines = []
            numbers = sorted({n for key in keys for n in sessions.newest[key]})
            for number in numbers:
                name = next(sessions.newest[key][number]["prompt"] for key in keys if number in sessions.newest[key])
                lines.append(f"| {name} | {' | '.join(_prompt_cell(sessions, key, number) for key in keys)} |")
            sums = [_figures(sessions, key, numbers[-1])[1] for key in keys]
            lines.append(f"| sum | {' | '.join(sums)} |")
            noticed = [_noticed(sessions, key) for key in keys]
            lines.append(f"| steps over {NOTICED} of eager's | {' | '.join(noticed)} |")
            parts.append(lines_of([title, *heads], lines))
    return "\n\n".join([*parts, "\n".join(sources)]) if parts else ""


def _prompt_cell(sessions: Sessions, key: tuple, number: int) -> str:
    row = sessions.newest[key].get(number)
    seconds = _cell([row], [sessions.eager(key).get(number)])
    return f"{seconds}, {row['longest_step']:.3g}" if row and "longest_step" in row else seconds


def _noticed(sessions: Sessions, key: tuple) -> str:
    """How many steps took longer than NOTICED times eager's usual step for that prompt."""
    eager = sessions.eager(key)
    pairs = [(row, eager.get(n, {})) for n, row in sessions.newest[key].items() if "steps" in row]
    if not pairs or any("steps" not in of_eager for _, of_eager in pairs):
        return "-"
    return str(sum(s > NOTICED * statistics.median(other["steps"]) for row, other in pairs for s in row["steps"]))


def _measured() -> tuple[list[tuple[Setup, dict[str, dict]]], list[str]]:
    """[(set-up, {variant: row})] from the newest run that finished ours with default settings; and the source lines."""
    everything, sources = rows("table", "table")
    complete = [row for row in everything if ("seconds" in row or "died" in row) and not row.get("settings")]
    measured = []
    for name, setup in SETUPS.items():
        if ours := newest(complete, setup=name, variant="ours"):
            beside = {v: newest(complete, setup=name, variant=v, source=ours["source"]) for v in PEERS_AND_OURS}
            if "seconds" in (beside["eager"] or {}):
                measured.append((setup, {variant: row for variant, row in beside.items() if row}))
    return measured, sources


def _variants(measured: list[tuple[Setup, dict[str, dict]]]) -> list[str]:
    """The variants that any of the runs has measured, without `ours_static`, which only `table_table` shows."""
    return [v for v in PEERS_AND_OURS if v != "ours_static" and any(v in of for _, of in measured)]


def _setup_title(setup: Setup) -> str:
    parts = (NAMES[setup.model].partition(",")[0], FORMATS.get(setup.weights), OPTIONS.get(setup.option))
    return ", ".join(part for part in parts if part)


def _row_title(setup: Setup) -> str:
    """What a row of a table was measured with: model, weights, size of the image, steps."""
    weights = FORMATS.get(setup.weights, PRECISIONS[setup.model])
    name, size = NAMES[setup.model].partition(",")[0], re.search(r"\d+(x\d+)+", NAMES[setup.model])
    return ", ".join(
        part for part in (name, weights, size[0], OPTIONS.get(setup.option), f"{STEPS[setup.model]} steps") if part
    )


def table_table() -> str:
    """One line per set-up and variant."""
    measured, sources = _measured()
    if not measured:
        return ""
    noises = {(setup.model, setup.weights): noise_of(of["eager"]) for setup, of in measured if not setup.option}
    head = ["", "", "first prompt, s", "once compiled, s", "step, s", "code ready after, s", "graphs", "breaks"]
    head += ["CUDA graphs", "error", "noise", "VRAM, GiB"]
    lines = []
    for setup, of in measured:
        for variant, row in of.items():
            first, eager_first = (next(iter(r["prompts"]), {}) for r in (row, of["eager"]))
            noise = noises.get((setup.model, setup.weights)) if variant == "eager" else None
            cells = [
                _row_title(setup) if variant == "eager" else "",
                VARIANTS[variant],
                value_cell(first, eager_first, "seconds", 1),
                value_cell(row, of["eager"], "seconds", 2),
                value_cell(row, of["eager"], "step", 4),
                str(row.get("ready") or "-") if variant in ("eager", "ours", "ours_static") else "in the first",
                *(str(row.get(key, "-")) for key in ("graphs", "breaks", "cuda_graphs")),
                f"{row['error']:.4f}" if "error" in row else "-",
                "-" if noise is None else f"{noise:.4f}",
                f"{row['vram_gib']:.1f}" if "vram_gib" in row else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines_of(head, lines, sources)


# The README's lines, the largest gain first.
README_SETUPS = ("sdxl", "flux-scaled", "flux-int8", "flux", "wan22", "z_image")
# Models whose name is too long for the chart, or that are cut in depth: name, detail.
CHART_NAMES = {"wan22": ("Wan 2.2 14B", "12 of 40 blocks"), "qwen_edit": ("Qwen-Image-Edit", "20 of 60 blocks")}


def _stays_uncompiled(row: dict) -> bool:
    """Whether our pack put compiling off beyond the measured prompts."""
    return row.get("graphs") == 0 and not row.get("cuda_graphs")


def _first(row: dict) -> float | None:
    return next((prompt.get("seconds") for prompt in row["prompts"]), None)


def _gain(of: dict[str, dict], digits: int = 9) -> str:
    """The change of a prompt's seconds with ours, in whole percent, from seconds that are rounded to `digits` decimals."""
    ours, eager = (round(of[variant]["seconds"], digits) for variant in ("ours", "eager"))
    return f"{ours / eager - 1:+.0%}".replace("%", " %")


def _digits(measured: list[tuple[Setup, dict[str, dict]]]) -> int:
    """Decimals of the shown seconds with which a reader's own arithmetic gives the shown percentages."""
    return next((n for n in (1, 2) if all(_gain(of, n) == _gain(of) for _, of in measured)), 3)


def gains_table() -> str:
    """For the README: one line per set-up, seconds of a prompt once compiled and of the first prompt, for each variant.

    The table has no source lines: the caption of the chart above it says where both were measured.
    """
    measured, _ = _measured()
    measured = [pair for name in README_SETUPS for pair in measured if pair[0].name == name]
    if not measured:
        return ""
    variants, digits = [v for v in _variants(measured) if all(v in of for _, of in measured)], _digits(measured)
    lines = []
    for setup, of in measured:
        cells = [_row_title(setup) + (" ¹" if _stays_uncompiled(of["ours"]) else "")]
        for variant in variants:
            row = of.get(variant, {})
            seconds = f"{row['seconds']:.{digits}f}" if "seconds" in row else "dies" if "died" in row else "-"
            if variant == "ours":
                seconds = f"**{seconds}** ({_gain(of)})"
            cells.append(seconds)
        firsts = [_first(of[variant]) if variant in of else None for variant in variants]
        cells += [f"{seconds:.1f}" if seconds else "-" for seconds in firsts]
        lines.append(f"| {' | '.join(cells)} |")
    shown = {"eager": "uncompiled", "ours": "with this pack"}
    names = [shown.get(variant, VARIANTS[variant]) for variant in variants]
    return lines_of(["seconds an image", *names, f"first image: {names[0]}", *names[1:]], lines)


def gains_in_short() -> str:
    """The README's first line of figures."""
    measured, _ = _measured()
    of_setup = {setup.name: (setup, of) for setup, of in measured}
    found = [of_setup[name] for name in ("sdxl", "flux") if name in of_setup]
    gains, n = [], _digits(found)
    for setup, of in found:
        before, after = (of[variant]["seconds"] for variant in ("eager", "ours"))
        device = of["ours"]["device"]
        gains.append(f"{_setup_title(setup)} {before:.{n}f} → {after:.{n}f} s an image ({_gain(of)}) on one {device}")
    return ", ".join(gains)


def gain_of_gguf() -> str:
    """For the README: the gain of Flux as GGUF, and the GPU."""
    measured, _ = _measured()
    of = next(of for setup, of in measured if setup.name == "flux-gguf")
    return f"{_gain(of)} on one {of['ours']['device']}"


def slowest_first() -> str:
    """For the README: of the first prompts in its table, the one that the default mode delays most."""
    pairs = [
        (_first(of["ours"]), _first(of["eager"]), setup)
        for setup, of in _measured()[0]
        if setup.name in README_SETUPS and not _stays_uncompiled(of["ours"])
    ]
    ours, eager, setup = max((pair for pair in pairs if pair[0] and pair[1]), key=lambda pair: pair[0] / pair[1])
    return f"{_setup_title(setup)} {ours:.1f} s instead of {eager:.1f} s"


def uncompiled_note(setups: Iterable[str] = SETUPS) -> str:
    """The footnote of the rows of `setups` that are marked with ¹; empty if none is."""
    marked = [setup for setup, of in _measured()[0] if setup.name in setups and _stays_uncompiled(of["ours"])]
    models = dict.fromkeys(_setup_title(Setup(setup.model)) for setup in marked)
    if not models:
        return ""
    return (
        f"¹ Uncompiled in all prompts that were measured: {', '.join(models)}. Prompts so quick are compiled after so\n"
        "many of them that it is likely to pay off; the node tells you how many are left."
    )


def readme_uncompiled_note() -> str:
    return uncompiled_note(README_SETUPS)


def where_measured() -> str:
    """For the README's caption of the chart: GPU, versions and dates of the table's runs."""
    dates: dict[str, list[str]] = {}
    for source in _measured()[1]:
        versions, _, date = source.rpartition(", `")[0].rpartition(", ")
        dates.setdefault(versions, []).append(date)
    spans = {versions: f"{min(of)} to {max(of)}" if len(of) > 1 else of[0] for versions, of in dates.items()}
    return "; ".join(f"{versions}, {span}" for versions, span in spans.items())


def _by_default() -> list[dict[str, dict]]:
    """The README's rows that were compiled."""
    return [of for setup, of in _measured()[0] if setup.name in README_SETUPS and not _stays_uncompiled(of["ours"])]


def ready_after() -> str:
    """For the README: seconds from the first prompt until its blocks are compiled, of models that have compiled graphs."""
    seconds = [of["ours"]["ready"] for of in _by_default() if of["ours"]["graphs"]]
    return f"{min(seconds):.0f} to {max(seconds):.0f} s"


def without_dynamic_vram() -> str:
    """For the README: Flux with KJNodes' node and `--disable-dynamic-vram`, its steps and the prompt that adds a LoRA."""
    sessions, with_lora = Sessions(rows("sessions", "session")[0]), []
    flux = next(of for setup, of in _measured()[0] if setup.name == "flux")
    shares = [flux[variant]["step"] / flux["eager"]["step"] for variant in ("kjnodes_static", "ours")]
    for variant in ("kjnodes_static", "ours"):
        of_session = sessions.newest["flux", 0.0, 0, variant, "cold"].values()
        with_lora.append(next(row["seconds"] for row in of_session if row["prompt"] == "LoRA on"))
    return (
        f"its steps of Flux took {shares[0]:.2f} of uncompiled ones (ours {shares[1]:.2f}), "
        f"but the image for which a LoRA was switched on {with_lora[0]:.0f} s (ours {with_lora[1]:.1f})"
    )


def little_vram() -> str:
    """For the README: the gain of Flux with little VRAM free, from the last prompt of each session."""
    sessions, gains = Sessions(rows("sessions", "session")[0]), []
    for model, free in sessions.set_ups():
        key = (model, free, 0, "ours", "cold")
        ours, eager = sessions.newest.get(key, {}), sessions.eager(key)
        if model == "flux" and free and (last := max(ours.keys() & eager.keys(), default=None)):
            gain = f"{ours[last]['seconds'] / eager[last]['seconds'] - 1:+.0%}".replace("%", " %")
            gains.append(f"{gain} with {free:g} GiB free")
    return ", ".join(gains)


def more_vram() -> str:
    """For the README: by how many GiB ours raises the peak VRAM of the uncompiled model at most."""
    return f"{max(of['ours']['vram_gib'] - of['eager']['vram_gib'] for of in _by_default()):.1f} GiB"


def _recorded() -> dict:
    """The row of Flux with the node that benchmarks/ready.py of f53a9b8 recorded; `where` names GPU, versions and date."""
    found, sources = rows("ready", "ready")
    row = next(row for row in found if row["source"] == found[-1]["source"] and row["model"] == "flux")
    return {**row, "where": sources[-1].rpartition(", `")[0]}


def recorded_line() -> dict:
    """The node's status line on a GPU once Flux is compiled, as the server sends it to the page; for devtools/pictures.py.

    The line compares the median step without the node and that of the last prompt.
    """
    row = _recorded()
    before, now = row["eager"]["step"], row["step_after"]
    steps = ["faster", f"{1 - now / before:.0%}", f"{before:.3f}", f"{now:.3f}"]
    return {"state": "faster", "says": ["readyBut", steps], "seconds": None, "begins": None}


def recorded_where() -> str:
    """The caption of the pictures that show `recorded_line`."""
    row = _recorded()
    steps = len(row["prompts"][-1]["steps"])
    return f"{NAMES['flux']}, {PRECISIONS['flux']}, {steps} steps on {row['where']}"


def prompt_ratios() -> list[tuple[str, str, list[float | None]]]:
    """Seconds of a prompt once compiled relative to eager's, KJNodes' and ours, for the chart; the largest gain first."""
    measured, _ = _measured()
    groups = []
    for setup, of in measured:
        if setup.option or _stays_uncompiled(of["ours"]):  # the ratio of two uncompiled runs is noise
            continue
        name, cut = CHART_NAMES.get(setup.model, (NAMES[setup.model].partition(",")[0], ""))
        detail = ", ".join(
            part for part in (FORMATS.get(setup.weights, "").strip("`"), cut, f"{STEPS[setup.model]} steps") if part
        )
        rows_of = [of.get(variant, {}) for variant in ("kjnodes", "ours")]
        without = [math.inf if "died" in row else None for row in rows_of]
        ratios = [
            row["seconds"] / of["eager"]["seconds"] if "seconds" in row else none
            for row, none in zip(rows_of, without, strict=True)
        ]
        groups.append((name, detail, ratios))
    return sorted(groups, key=lambda group: group[2][-1] or math.inf)


def short_table() -> str:
    """For docs/figures.md: one line per set-up with a prompt and a step once compiled, and the first prompt."""
    measured, sources = _measured()
    if not measured:
        return ""
    variants, lines = _variants(measured), []
    for setup, of in measured:
        cells = [_row_title(setup) + (" ¹" if _stays_uncompiled(of["ours"]) else "")]
        for key, digits in (("seconds", 1), ("step", 3)):
            eager = of["eager"]
            cells.append(f"{eager[key]:.{digits}f}" if key in eager else "-")
            for variant in variants[1:]:
                row = of.get(variant) or {}
                share = f"{row[key] / eager[key]:.2f}" if key in row and key in eager else "dies" if "died" in row else "-"
                cells.append(f"**{share}**" if variant == "ours" else share)
        firsts = [_first(of[variant]) if variant in of else None for variant in variants]
        cells.append(", ".join(f"{seconds:.1f}" if seconds else "-" for seconds in firsts))
        lines.append(f"| {' | '.join(cells)} |")
    peers = [VARIANTS[variant] for variant in variants[1:]]
    head = ["", "a prompt, uncompiled, s", *peers, "a step, uncompiled, s", *peers]
    return lines_of([*head, f"first prompt, s: uncompiled, {', '.join(peers)}"], lines, sources)
