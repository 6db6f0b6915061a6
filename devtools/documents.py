"""Check tests/documents.md: each row names a test that exists. python -m devtools.documents"""

import re
import sys

from .commands import ROOT

DOCUMENTS = {f"00{number}" for number in range(5)}


def check(text, root=ROOT):
    """What is wrong with the rows of the table, a line each."""
    rows = [line for line in text.splitlines() if re.match(r"\| \d{3}", line)]
    mentioned = {number for row in rows for number in re.findall(r"\d{3}", row.split("|")[1])}
    lines = [f"document {number} has no row, or is not known" for number in sorted(DOCUMENTS ^ mentioned)]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) != 3:
            lines.append(f"has not three columns: {row}")
            continue
        file, _, name = cells[2].partition("::")
        if not (root / file).is_file():
            lines.append(f"{file} does not exist")
        elif name and f"def {name}(" not in (root / file).read_text(encoding="utf-8"):
            lines.append(f"{file} has no {name}")
    return lines


def main():
    text = (ROOT / "tests" / "documents.md").read_text(encoding="utf-8")
    lines = check(text)
    print("\n".join(lines) or f"{text.count(chr(10) + '| 0')} rows, each with its test")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
