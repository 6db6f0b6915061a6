"""Run the steps of set-up: print progress, log the output of commands, raise errors that say what to do."""

import os
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / ".dev"
LOG = DEV / "setup.log"
FREE_GB = 12


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text):
    print(text, flush=True)


def check_disk(folder):
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        raise SetupError(
            f"not enough disk space in {folder}: {free:.1f} GB free, {FREE_GB} GB are needed (PyTorch "
            "with CUDA). Free some, or move the checkout to a larger disk."
        )


def run(command, doing, **variables):
    """Run a command with `variables` added to the environment; logs its output and prints progress every few seconds."""
    started = shown = time.monotonic()
    lines = []
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(map(str, command))}\n")
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=DEV,
            env={**os.environ, **variables},
        )
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            if line.startswith("Installing collected packages"):
                say(f"    {time.monotonic() - started:4.0f} s  installing what was downloaded, a minute or two")
            elif line.startswith(("Collecting", "Processing", "Building")) and time.monotonic() - shown > 5:
                shown = time.monotonic()
                say(f"    {shown - started:4.0f} s  {line.strip()[:80]}")
    if process.wait():
        tail = "".join(lines[-12:])
        why = "is the disk full, or the package registry out of reach?"
        raise SetupError(f"{doing} failed ({why}); the whole output is in {LOG}\n{tail}")


def step(text, action):
    say(f"  {text} ...")
    started = time.monotonic()
    action()
    say(f"  {text}: done in {time.monotonic() - started:.0f} s")
