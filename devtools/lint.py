"""Run the checks that need no run of the pack: `python dev.py lint`. Each step is a process; two run at a time."""

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .commands import ROOT, say


@dataclass(frozen=True)
class Step:
    """A command that ends with 0 if nothing is wrong.

    Args:
        command: arguments of the interpreter in which the pack's tests run.
        refused: a pattern that must not be in the output, whatever the exit status.
    """

    name: str
    command: tuple[str, ...]
    refused: str | None = None


def steps(python, host):
    """All steps, the longest first.

    Args:
        python: the interpreter.
        host: the folder of ComfyUI.
    """
    comfy = ("-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", "node", "validate")
    found = [
        Step("texts", ("-m", "devtools.texts", "--comfyui", str(host))),
        Step("mypy", ("-m", "mypy")),
        Step("registry", comfy, r"(?i)error|warning|S102|S307|E702"),
        Step("tables", ("-m", "benchmarks.tables", "--check")),
        Step("rooms", ("-m", "devtools.rooms")),
        Step("ruff", ("-m", "ruff", "check", "--output-format=concise")),
        Step("format", ("-m", "ruff", "format", "--check")),
    ]
    return [Step(step.name, (str(python), *step.command), step.refused) for step in found]


def run_step(step, root=ROOT):
    """(whether nothing is wrong, what the step wrote, its seconds)."""
    started = time.monotonic()
    # The caches of mypy and ruff stay in the checkout, which makes the second run short.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each step compiles its imports to bytecode
    done = subprocess.run(
        step.command, cwd=root, env=environment, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    output = done.stdout + done.stderr
    good = done.returncode == 0 and not (step.refused and re.search(step.refused, output))
    # comfy-cli prints its findings on stderr; other tools print unrelated lines there.
    return good, output if step.refused or not good else done.stdout, time.monotonic() - started


def run_steps(chosen, root=ROOT, at_once=2):
    """Run all steps, whether or not one fails, and print a line for each; returns how many failed."""
    failed = 0
    with ThreadPoolExecutor(at_once) as pool:
        for step, (good, output, seconds) in zip(chosen, pool.map(lambda step: run_step(step, root), chosen), strict=True):
            lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
            say(f"{'ok    ' if good else 'FAILED'} {step.name:10}{seconds:5.1f} s  {lines[-1].strip()[:90]}")
            if not good:
                failed += 1
                say("\n".join(f"       {line}" for line in lines))
    return failed


def main(python, host):
    """Run all steps; returns the exit status."""
    chosen = steps(python, host)
    failed = run_steps(chosen)
    say(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0
