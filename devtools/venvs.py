"""Make venvs for ComfyUI under .dev/, one for each PyTorch; a stamp file in each holds the requirements installed there."""

import hashlib
import os
import re
import sys
from pathlib import Path

from .commands import DEV, ROOT, SetupError, check_disk, run, say, step

PINNED = "2.11"
# PyTorch -> the newest of that version in the registry, and the torchvision that goes with it (its `Requires-Dist`)
TORCH = {
    "2.8": ("2.8.0", "0.23.0"),
    "2.9": ("2.9.1", "0.24.1"),
    "2.10": ("2.10.0", "0.25.0"),
    "2.11": ("2.11.0", "0.26.0"),
    "2.12": ("2.12.1", "0.27.1"),
    "2.13": ("2.13.0", "0.28.0"),
    "2.14": ("2.14.1", "0.29.2"),
    "2.15": ("2.15.0", "0.29.2"),
}
NEWEST = "2.15"
# The last version of torchaudio, which requires no version of PyTorch; each earlier version is for the PyTorch of its number.
TORCHAUDIO = "2.11.0"
WITHOUT_CHECK = """

# torch-compile-kit, a test environment: torchaudio's CUDA is older than PyTorch's, which nothing here depends on.
def _check_cuda_version():
    return None
"""


def python_in(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv_folder(torch=PINNED):
    """.dev/venv, or .dev/venv-2.15; folders of the user's cache when the checkout's path has a space in it."""
    name = "venv" if torch == PINNED else f"venv-{torch}"
    if not re.search(r"\s", str(DEV)):
        return DEV / name
    # PyTorch hands its own folder to the linker unquoted (2.11), so nothing would compile on the CPU.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch-compile-kit" / f"{name}-{hashlib.sha256(str(DEV).encode()).hexdigest()[:12]}"


def complete(venv):
    # pip comes last: a venv whose making was interrupted has a python and no pip.
    return python_in(venv).exists() and any(python_in(venv).parent.glob("pip*"))


def make_venv(venv):
    try:
        run([sys.executable, "-m", "venv", venv], "making a virtual environment")
    except SetupError as error:
        raise SetupError(f"{error}\nOn Debian and Ubuntu: apt-get install python3-venv python3-dev g++") from None


def requirements(host, torch=PINNED):
    """The lines of one requirements file: the host's, the pinned PyTorch, and what dev.py adds."""
    lines = (host / "requirements.txt").read_text(encoding="utf-8").splitlines()
    # Bare torch names would be a second, unpinned requirement for the same package.
    lines = [line for line in lines if line.strip() not in ("torch", "torchvision", "torchaudio")]
    version, torchvision = TORCH[torch]
    torchaudio = min(version, TORCHAUDIO, key=_numbers)
    # A build for CPUs alone, if an index has one, would satisfy `torch==` too, but torchvision does not go with that build.
    lines += [f"torch=={version},!={version}+cpu", f"torchvision=={torchvision}", f"torchaudio=={torchaudio}"]
    lines += (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _numbers(version):
    return [int(number) for number in version.split(".")]


def difference(before, after):
    """In words: the lines of the second list that the first does not have."""
    return ", ".join(line for line in after if line not in before) or "less than before"


def install(venv, host, torch=PINNED):
    """Install the requirements of this ComfyUI with this PyTorch, unless the venv's stamp has the same."""
    wanted = requirements(host, torch)
    stamp, text = venv / "torch-compile-kit-installed.txt", "\n".join(wanted)
    before = stamp.read_text(encoding="utf-8") if stamp.exists() else None
    if before == text:
        return
    if before is None:
        check_disk(venv)
        doing = "PyTorch and the requirements of ComfyUI, about 5 GB"
    else:
        say(f"  {venv.name} was made for other requirements; this ComfyUI wants {difference(before.splitlines(), wanted)}")
        doing = f"the requirements of {host.name}, where they differ"
        # Until all is installed, the environment fits neither the old nor the new requirements.
        stamp.unlink()
    file = venv / "requirements.txt"
    file.write_text(text, encoding="utf-8")
    # --no-compile: most of the 19,000 modules are never imported; Python compiles a module when it is imported.
    pip = [python_in(venv), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
    pip += ["-r", file]
    # Ignore the machine's `constraint` in pip.conf, which is meant for installations that name no version of PyTorch.
    step(doing, lambda: run(pip, "installing the requirements", PIP_CONSTRAINT=os.devnull))
    if _numbers(TORCH[torch][0]) > _numbers(TORCHAUDIO):
        let_torchaudio_import(venv)
    stamp.write_text(text, encoding="utf-8")


def let_torchaudio_import(venv):
    """Switch off, in this venv, torchaudio's check that PyTorch has the same CUDA: ComfyUI imports torchaudio."""
    name = "site-packages/torchaudio/_extension/utils.py"
    for file in [*venv.glob(f"lib/python*/{name}"), *venv.glob(f"Lib/{name}")]:
        text = file.read_text(encoding="utf-8")
        if "def _check_cuda_version" not in text:
            raise SetupError(f"torchaudio {TORCHAUDIO}: {file} has no _check_cuda_version; see what its import asks for now")
        if WITHOUT_CHECK not in text:
            file.write_text(text + WITHOUT_CHECK, encoding="utf-8")
        return
    raise SetupError(f"torchaudio {TORCHAUDIO} is not in {venv}, or lies elsewhere there: ComfyUI would not start")
