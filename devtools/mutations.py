"""Apply each mutation of mutations.txt to a copy of the checkout and check that its tests fail.

python -m devtools.mutations --comfyui FOLDER      # run it with the Python whose PyTorch is to be tested

1. Each edit of the table must match whole lines of the code exactly once. Code that has moved is an error, as is a lost test.
2. The named tests run once on an unchanged copy of the checkout and must pass.
3. For each row the edit is made in a copy, the tests of the row run in a process of their own, and the file is restored.

A row is `caught` when one of its tests fails. Only fixtures fail, no test runs, or the time limit is over: an error.
"""

import argparse
import datetime
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import hosts, matrix
from .commands import ROOT

TABLE = Path(__file__).with_name("mutations.txt")
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
COMMAND = "python -m devtools.mutations --comfyui COMFYUI"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "node_modules")
LIMIT_SECONDS = 300
BASELINE_SECONDS = 3600
KINDS = ("caught", "not caught", "error", "none")
# pytest's summary, `-rpfEs`: the id of a test may hold spaces and commas.
ENDED = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) (.+?)(?: - .*)?$", re.MULTILINE)


class TableError(Exception):
    """A row cannot be used; the text names it."""


@dataclass
class Edit:
    """Lines of a file, and what stands in their place while the mutation is made."""

    file: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def apply(self, root):
        """Edit the file below `root`; returns its text of before."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines, size = text.split("\n"), len(self.old)
        places = [at for at in range(len(lines)) if lines[at : at + size] == self.old]
        if not size or len(places) != 1:
            raise TableError(f"{self.file} has these lines {len(places)} times, not once:\n" + "\n".join(self.old))
        [at] = places
        edited = "\n".join([*lines[:at], *self.new, *lines[at + size :]])
        if path.suffix == ".py":
            try:
                compile(edited, self.file, "exec")
            except SyntaxError as error:
                raise TableError(f"{self.file} is no Python any more: {error}") from None
        path.write_text(edited, encoding="utf-8")
        return text


@dataclass
class Mutation:
    """One row of the table.

    Args:
        group: the heading above it.
        claim: what the code does that the mutation takes away.
        edits: none where the fix cannot be taken away any more; `comments` say why.
        tests: node ids of pytest.
    """

    number: int
    group: str
    claim: str
    edits: list[Edit] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def apply(self, root):
        """Make all edits or none; returns a function that puts the files back."""
        before = []

        def restore():
            for path, text in reversed(before):
                path.write_text(text, encoding="utf-8")

        try:
            for edit in self.edits:
                before.append((root / edit.file, edit.apply(root)))
        except TableError:
            restore()
            raise
        return restore

    def check_tests(self, root):
        for test in self.tests:
            if not has_test(root, test):
                raise TableError(f"there is no {test}")


def has_test(root, test):
    """Whether the file of a test has a function of that name; whether it has such a parameter, only pytest can tell."""
    file, _, name = test.partition("::")
    function = name.rpartition("::")[2].partition("[")[0]
    return (root / file).is_file() and f"def {function}(" in (root / file).read_text(encoding="utf-8")


def read_table(text):
    """The rows of a table: paragraphs of a claim, files with lines as in a diff, tests, and comments; see mutations.txt."""
    rows, group = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        row = None
        for line in filter(str.strip, paragraph.splitlines()):
            if line.startswith("== "):
                group = line.removeprefix("== ")
            elif line.startswith("#"):
                if row is not None:
                    row.comments.append(line.removeprefix("#").strip())
            elif row is None:
                row = Mutation(len(rows) + 1, group, line)
                rows.append(row)
            elif line[0] in " -+" and row.edits:
                if line[0] != "+":
                    row.edits[-1].old.append(line[1:])
                if line[0] != "-":
                    row.edits[-1].new.append(line[1:])
            elif line.startswith("tests/"):
                row.tests.append(line)
            elif (ROOT / line).suffix and " " not in line:
                row.edits.append(Edit(line))
            else:
                raise TableError(f"row {row.number} ({row.claim}): what is this line? {line!r}")
    return rows


@dataclass
class Outcome:
    """How a row ended: one of KINDS, `none` where the table has no edit.

    Args:
        reason: the tests that failed, or what went wrong.
    """

    kind: str
    reason: str = ""
    seconds: float = 0.0


def run_pytest(root, tests, limit, stop=True):
    """Run tests of the checkout at `root`; {"PASSED": ids, "FAILED": ids, ...} and the output; None when it took too long."""
    options = ["-q", "-rpfEs", "-p", "no:cacheprovider", "--tb=short", *(["-x"] if stop else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "COLUMNS": "1000"},  # pytest cuts the lines of its summary
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # tests/conftest.py then ends its server
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return None, output
    results = {}
    for kind, test in ENDED.findall(output.rpartition("short test summary info")[2]):
        results.setdefault(kind, []).append(test)
    return results, output


def run_row(mutation, root, failing=(), limit=LIMIT_SECONDS):
    """Run the tests of a row in the copy at `root` with its code taken away.

    Args:
        failing: tests that fail without it.
    """
    if not mutation.edits:
        return Outcome("none", " ".join(mutation.comments))
    if not mutation.tests:
        return Outcome("error", "no test is named")
    broken = [test for test in failing if any(test == named or test.startswith(f"{named}[") for named in mutation.tests)]
    if broken:
        return Outcome("error", f"fails without the mutation: {', '.join(broken)}")
    began = time.monotonic()
    try:
        mutation.check_tests(root)
        restore = mutation.apply(root)
    except TableError as error:
        return Outcome("error", str(error))
    try:
        results, output = run_pytest(root, mutation.tests, limit)
    finally:
        restore()
    seconds = time.monotonic() - began
    if results is None:
        return Outcome("error", f"the tests ran longer than {limit} s", seconds)
    if results.get("FAILED"):
        return Outcome("caught", ", ".join(results["FAILED"]), seconds)
    if results.get("PASSED") and not results.get("ERROR"):
        return Outcome("not caught", seconds=seconds)
    return Outcome("error", f"no test failed or passed:\n{output[-2000:]}", seconds)


def failing_without_mutation(root, rows):
    """The named tests that fail in an unchanged copy of the checkout; those that are not there are left to their rows."""
    tests = list(dict.fromkeys(test for row in rows if row.edits for test in row.tests if has_test(root, test)))
    results, output = run_pytest(root, tests, BASELINE_SECONDS, stop=False)
    # Of a test that has parameters, but not these, pytest names the function.
    missing = [
        test for test in tests if any(f"not found: {root / name}\n" in output for name in (test, test.partition("[")[0]))
    ]
    if missing and len(missing) < len(tests):  # then pytest has run none
        tests = [test for test in tests if test not in missing]
        results, output = run_pytest(root, tests, BASELINE_SECONDS, stop=False)
    if results is None or not results.get("PASSED"):
        raise TableError(f"the tests do not run without any mutation:\n{output[-4000:]}")
    return [*results.get("FAILED", ()), *results.get("ERROR", ())]


def run_rows(rows, jobs=1, on_row_end=lambda row, outcome: None):
    """{number of the row: Outcome}, `jobs` at a time, each in a copy of its own; `on_row_end` is called as each ends."""
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-mutations-", ignore_cleanup_errors=True) as folder:
        copies = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / f"copy-{number}", ignore=NOT_COPIED)))
        first = copies.get()
        failing = failing_without_mutation(first, rows)
        copies.put(first)

        def one(row):
            root = copies.get()
            try:
                outcomes[row.number] = run_row(row, root, failing)
            finally:
                copies.put(root)
            on_row_end(row, outcomes[row.number])

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, sorted(rows, key=lambda row: (row.tests[:1], row.number))))
    return outcomes


def results_json(rows, outcomes, environment):
    """In the form of the other results files."""
    return {
        "environments": [environment],
        "rows": [
            {
                "kind": "mutation",
                "number": row.number,
                "group": row.group,
                "claim": row.claim,
                "files": [edit.file for edit in row.edits],
                "tests": row.tests,
                "outcome": outcomes[row.number].kind,
                "reason": outcomes[row.number].reason,
                "seconds": round(outcomes[row.number].seconds, 1),
            }
            for row in rows
        ],
    }


def format_row(row, outcome):
    reason = f"\n{'':17}{outcome.reason}" if outcome.kind in ("error", "none") and outcome.reason else ""
    return f"{row.number:4} {outcome.kind:<10} {row.claim}{reason}"


def summary(outcomes):
    counts = Counter(outcome.kind for outcome in outcomes.values())
    return f"{len(outcomes)} mutations: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, help="the folder of ComfyUI")
    parser.add_argument("--only", metavar="N,N-N", help="numbers of rows; nothing is written unless --out is given")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time, each in a copy of the checkout")
    parser.add_argument("--out", type=Path, help=f"results file; {RESULTS.relative_to(ROOT)} for all rows")
    parser.add_argument("--check", action="store_true", help="only whether each edit fits the code and each test is there")
    options = parser.parse_args()
    rows = read_table(TABLE.read_text(encoding="utf-8"))
    if options.only:
        chosen = set()
        for part in options.only.split(","):
            first, _, last = part.partition("-")
            chosen.update(range(int(first), int(last or first) + 1))
        rows = [row for row in rows if row.number in chosen]
    if options.check:
        sys.exit(check(rows))
    if options.comfyui is None:
        parser.error("--comfyui is needed to run tests")
    host = options.comfyui.resolve()
    os.environ["COMFYUI_PATH"] = str(host)
    began = time.monotonic()
    try:
        outcomes = run_rows(rows, options.jobs, lambda row, outcome: print(format_row(row, outcome), flush=True))
    except TableError as error:
        sys.exit(str(error))
    print("\n" + "\n".join(format_row(row, outcomes[row.number]) for row in rows))
    print(f"\n{summary(outcomes)}; {time.monotonic() - began:.0f} s")
    out = options.out or (None if options.only else RESULTS)
    if out is not None:
        probe = subprocess.run([sys.executable, "-c", matrix.PROBE], capture_output=True, text=True, check=True)
        date = datetime.date.today().isoformat()
        environment = {"comfyui": hosts.version_in(host), **json.loads(probe.stdout), "date": date, "command": COMMAND}
        out.write_text(json.dumps(results_json(rows, outcomes, environment), indent=1) + "\n", encoding="utf-8")
    sys.exit(any(outcome.kind not in ("caught", "none") for outcome in outcomes.values()))


def check(rows):
    """Whether each row fits the code, said for those that do not; the exit status."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=NOT_COPIED))
        for row in rows:
            try:
                row.check_tests(root)
                row.apply(root)()
            except TableError as error:
                wrong += 1
                print(f"row {row.number} ({row.claim}): {error}")
    print(f"{len(rows)} rows, {wrong} do not fit")
    return int(wrong > 0)


if __name__ == "__main__":
    main()
