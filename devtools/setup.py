"""Set up a ComfyUI and a venv for it under .dev/, once; later runs reuse both."""

from . import hosts, venvs
from .commands import DEV, LOG, SetupError, check_disk, step


def set_up(comfyui=None, torch=None):
    """(interpreter, ComfyUI folder), made ready.

    Args:
        comfyui: a ComfyUI folder, or a version that can be set up; None: the pinned version.
        torch: the PyTorch of a venv of ours, a key of `venvs.TORCH`; None: the pinned version.

    Raises:
        SetupError: what is missing or does not fit, and what to do.
    """
    DEV.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    host = hosts.choose(comfyui)
    torch = torch or venvs.PINNED
    venv = venvs.venv_folder(torch)
    ours = venvs.python_in(venv)
    try:
        if not venvs.complete(venv):
            venv.mkdir(parents=True, exist_ok=True)
            check_disk(venv)
            step(f"a virtual environment in {venv}", lambda: venvs.make_venv(venv))
        if not host.exists():
            step(f"ComfyUI in {host}", lambda: hosts.get(host, ours))
        venvs.install(venv, host, torch)
    except OSError as error:
        raise SetupError(f"the disk is full or the checkout cannot be written: {error}") from error
    return ours, host
