"""What a person waits for, as tables: the rows of kind `session` (sessions.py)."""

import statistics

from .rows import NAMES, rows
from .session_prompts import SESSIONS

VARIANTS = {"eager": "eager", "kjnodes": "KJNodes", "core": "core", "ours": "ours", "warmup": "ours, with Warmup"}
CACHES = ("cold", "warm")
RESTARTS = {prompt.name for session in SESSIONS.values() for prompt in session.prompts if prompt.restart}
# A step that takes longer than so many of eager's is one that a person notices.
NOTICED = 3


class Sessions:
    """The newest session of each kind, by (model, GiB free, cores, variant, cache), and eager's of the same file."""

    def __init__(self, found: list[dict]):
        self.newest: dict[tuple, dict[int, dict]] = {}
        self._by_file: dict[tuple, dict[int, dict]] = {}
        for row in found:
            key = (row["model"], row["free_gib"], row["cores"], row["variant"], row["cache"])
            self.newest[key] = self._by_file.setdefault((row["file"], *key), {})
            self.newest[key][row["number"]] = row

    def set_ups(self) -> list[tuple[str, float]]:
        """(model, GiB free) where there is something beside eager, in the order of the other tables, all memory first."""
        held = {key[:2] for key in self.newest if key[0] in NAMES and key[3] != "eager"}
        return sorted(held, key=lambda s: (list(NAMES).index(s[0]), -s[1] if s[1] else float("-inf")))

    def eager(self, key: tuple) -> dict[int, dict]:
        """Eager's session of the same file, so of the same machine, as number -> row; empty where there is none."""
        model, free, cores, *_ = key
        own = self.newest.get(key)
        return self._by_file.get((next(iter(own.values()))["file"], model, free, cores, "eager", "cold"), {}) if own else {}


def _cell(taken: list[dict], eager: list[dict]) -> str:
    """Seconds of these prompts together, and the ratio to eager's same prompts."""
    if not taken or None in taken:
        return "-"
    for row in taken:
        if "died" in row:
            return row["died"] if row["died"].startswith("no result") else f"dies: {row['died'].partition(':')[0]}"
    seconds = sum(row["seconds"] for row in taken)
    if not eager or None in eager or any("died" in row for row in eager):
        return f"{seconds:.1f}"
    if taken == eager:
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
    return NAMES[model] + (f", {free:g} GiB free" if free else "")


def sessions_table() -> str:
    """A line a model and variant: first image, the session cold and warm, the last prompt, and the session on four cores."""
    found, sources = rows("session")
    sessions = Sessions(found)
    if not sessions.set_ups():
        return ""
    columns = ["model", "", "first image", "session, cold", "session, warm", "once compiled", "4 cores: first image", "session"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model, free in sessions.set_ups():
        last = max(n for key, held in sessions.newest.items() if key[:2] == (model, free) for n in held)
        for variant, name in VARIANTS.items():
            if not any(key[:2] == (model, free) and key[3] == variant for key in sessions.newest):
                continue
            first, cold, compiled = _figures(sessions, (model, free, 0, variant, "cold"), last)
            _, warm, _ = _figures(sessions, (model, free, 0, variant, "warm"), last)
            few_first, few_cold, _ = _figures(sessions, (model, free, 4, variant, "cold"), last)
            title = f"{_title(model, free)}, {last} prompts" if variant == "eager" else ""
            lines.append(f"| {title} | {name} | {first} | {cold} | {warm} | {compiled} | {few_first} | {few_cold} |")
    return "\n".join([*lines, "", *sources])


def prompts_table() -> str:
    """For each session a table of its prompts: seconds, ratio to eager's and the longest step, of every variant."""
    found, sources = rows("session")
    sessions = Sessions(found)
    parts = []
    for model, free in sessions.set_ups():
        for cores in sorted({key[2] for key in sessions.newest if key[:2] == (model, free)}):
            keys = [(model, free, cores, variant, cache) for variant in VARIANTS for cache in CACHES]
            keys = [key for key in keys if key in sessions.newest]
            title = _title(model, free) + (f", {cores} cores" if cores else "")
            heads = [f"{VARIANTS[key[3]]}{'' if key[3] == 'eager' else ', ' + key[4]}" for key in keys]
            lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(keys) + 1) + "|"]
            numbers = sorted({n for key in keys for n in sessions.newest[key]})
            for number in numbers:
                name = next(sessions.newest[key][number]["prompt"] for key in keys if number in sessions.newest[key])
                lines.append(f"| {name} | {' | '.join(_prompt_cell(sessions, key, number) for key in keys)} |")
            sums = [_figures(sessions, key, numbers[-1])[1] for key in keys]
            lines.append(f"| sum | {' | '.join(sums)} |")
            noticed = [_noticed(sessions, key) for key in keys]
            lines.append(f"| steps over {NOTICED} of eager's | {' | '.join(noticed)} |")
            parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(sources)]) if parts else ""


def _prompt_cell(sessions: Sessions, key: tuple, number: int) -> str:
    row = sessions.newest[key].get(number)
    cell = _cell([row], [sessions.eager(key).get(number)])
    return f"{cell}, {row['longest_step']:.3g}" if row and "longest_step" in row else cell


def _noticed(sessions: Sessions, key: tuple) -> str:
    """How many steps took longer than three of eager's usual one for that prompt."""
    eager = sessions.eager(key)
    pairs = [(row, eager.get(n, {})) for n, row in sessions.newest[key].items() if "steps" in row]
    if not pairs or any("steps" not in of_eager for _, of_eager in pairs):
        return "-"
    return str(sum(s > NOTICED * statistics.median(other["steps"]) for row, other in pairs for s in row["steps"]))


PACKS = {"eager": "nothing", "core": "core", "kjnodes": "KJNodes", "wanvideowrapper": "WanVideoWrapper", "ours": "ours"}


def first_minutes_table() -> str:
    """What a newcomer does, waits for and is told, with each pack."""
    found, sources = rows("first minutes")
    of = {row["variant"]: row for row in found}
    columns = [
        "",
        "nodes to add",
        "links to draw",
        "inputs shown, all",
        "first image, s",
        "next",
        "new size",
        "again",
        "told then",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for variant, name in PACKS.items():
        row = of[variant]
        seconds = [f"{row['seconds'][prompt]:.1f}" if row["seconds"] else "-" for prompt in ("first", "next", "size", "again")]
        counts = [str(row["nodes"]), str(row["links"]), f"{row['inputs_shown']}, {row['inputs']}"]
        lines.append(f"| {' | '.join([name, *counts, *seconds, row['told']])} |")
    return "\n".join([*lines, "", *sources])
