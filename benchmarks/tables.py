"""Make the tables of README and docs, and the chart, from benchmarks/results/*.json.

python -m benchmarks.tables               # write them
python -m benchmarks.tables --check       # write nothing; end with 1 and name the files that differ
python -m benchmarks.tables --add FILE    # put a run into the results files, then write
"""

import argparse
import sys
from pathlib import Path

from . import chart, compatibility, figure_tables, results, session_tables
from .results import ROOT


def replace(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    around = "" if name in INLINE else "\n"
    return f"{before}{begin}{around}{table}{around}{end}{after}"


# Inserted within a line, without newlines.
INLINE = {
    "set-ups": lambda: str(len(compatibility.outcomes())),
    "measured": session_tables.where_measured,
    "in short": session_tables.gains_in_short,
    "gguf": session_tables.gain_of_gguf,
    "slowest first": session_tables.slowest_first,
    "ready": session_tables.ready_after,
    "vram": session_tables.more_vram,
    "without dynamic vram": session_tables.without_dynamic_vram,
    "little vram": session_tables.little_vram,
    "recorded": session_tables.recorded_where,
}
README = {"gains": session_tables.gains_table, "uncompiled": session_tables.readme_uncompiled_note, **INLINE}
FIGURES = {
    "table": session_tables.short_table,
    "uncompiled": session_tables.uncompiled_note,
    "ready": session_tables.ready_after,
    "parts": figure_tables.short_parts_table,
}
GUIDE = {"recorded": session_tables.recorded_where}
MEASUREMENTS = {
    "table": session_tables.table_table,
    "sessions": session_tables.sessions_table,
    "prompts": session_tables.prompts_table,
    "soak": figure_tables.soak_table,
    "parts": figure_tables.parts_table,
    "models": compatibility.set_ups_table,
}
FLEET = {"prebuilt": figure_tables.prebuilt_table}
FILES = {
    "README.md": README,
    "docs/fleet.md": FLEET,
    "docs/figures.md": FIGURES,
    "docs/guide.md": GUIDE,
    "docs/measurements.md": MEASUREMENTS,
}


def made() -> dict[Path, str]:
    """{file with figures: the text that it must hold}."""
    texts = {}
    for name, tables in FILES.items():
        texts[ROOT / name] = (ROOT / name).read_text(encoding="utf-8")
        for part, table in tables.items():
            texts[ROOT / name] = replace(texts[ROOT / name], part, table())
    return {
        **texts,
        ROOT / "docs" / "speed.svg": chart.draw(session_tables.prompt_ratios()),
        ROOT / "docs" / "compatibility.md": compatibility.page(),
    }


def stale() -> list[str]:
    """Paths, relative to the repository, of the files that differ from what the results files make."""
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
