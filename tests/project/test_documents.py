"""docs/documents.md: what was asked for, and the tests that it names."""

import re

from support import ROOT

TEXT = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if re.match(r"\| \d{3}", line)]


def test_each_row_has_a_test_that_exists_or_says_why_not():
    assert len(ROWS) > 30
    for row in ROWS:
        _, _, where, test = (cell.strip() for cell in row.strip("|").split("|"))
        if test == "-":
            assert "*open*" in where or "no meaning" in where, row
            continue
        file, _, name = test.partition("::")
        code = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in code, row


def test_all_five_documents_are_there():
    assert {number for row in ROWS for number in re.findall(r"\d{3}", row.split("|")[1])} == {f"00{n}" for n in range(5)}
