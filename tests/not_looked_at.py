"""A pytest plugin: one line at the end says what was not looked at for want of a program, and the command that installs it."""

import shutil
import sys

# What a reason to skip begins with -> (what was not looked at, the package of Debian and Ubuntu, of Homebrew).
PROGRAMS = {
    "Chromium": ("the page in a browser", "chromium", "--cask chromium"),
    "redis-server": ("the shared cache", "redis-server", "redis"),
    "Node": ("the page's scripts", "nodejs", "node"),
}
# Without a C++ compiler inductor compiles nothing on a CPU: those tests fail, and this says why.
COMPILERS = ("g++", "clang++", "cl")


def reasons(skipped):
    """The reason of each report of a skipped test."""
    for report in skipped:
        if isinstance(report.longrepr, tuple):
            yield report.longrepr[2].removeprefix("Skipped: ")


def command(packages):
    """What installs packages here.

    Args:
        packages: (of Debian and Ubuntu, of Homebrew) of each.
    """
    if sys.platform == "darwin":
        return f"brew install {' '.join(brew for _, brew in packages)}"
    root = "" if shutil.which("sudo") is None else "sudo "
    return f"{root}apt-get install {' '.join(debian for debian, _ in packages)}"


def line(skipped, has_compiler=None):
    """The line, or None where all was looked at.

    Args:
        skipped: the reasons.
        has_compiler: whether there is a C++ compiler; looked up if None.
    """
    parts, packages = [], []
    for program, (what, *of) in PROGRAMS.items():
        count = sum(reason.startswith(f"{program} is not installed") for reason in skipped)
        if count:
            parts.append(f"{what} ({program} is not installed, {count} skipped)")
            packages.append(tuple(of))
    if has_compiler is None:
        has_compiler = any(map(shutil.which, COMPILERS))
    if not has_compiler:
        parts.append("code for the CPU (there is no C++ compiler, its tests fail)")
        packages.append(("g++", "gcc"))
    return f"Not looked at: {'; '.join(parts)}. To install: {command(packages)}" if parts else None


def pytest_terminal_summary(terminalreporter):
    found = line(list(reasons(terminalreporter.stats.get("skipped", []))))
    if found:
        terminalreporter.write_line(found, yellow=True)
