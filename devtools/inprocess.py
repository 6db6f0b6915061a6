"""Set this process up as ComfyUI's main.py would: make ComfyUI's modules importable, and set its options."""

import os
import sys
from pathlib import Path

from .server import host_arguments


def host_folder():
    """The ComfyUI folder that dev.py chose."""
    folder = os.environ.get("COMFYUI_PATH")
    if not folder or not (Path(folder) / "comfy").is_dir():
        raise RuntimeError("COMFYUI_PATH names no ComfyUI folder; run this through `python dev.py`, which sets it")
    return Path(folder).resolve()


def has_gpu():
    import torch

    return torch.cuda.is_available()


def enter_host(base):
    """Import ComfyUI's options with `base` as the base directory; ComfyUI's other modules may be imported afterwards."""
    host = str(host_folder())
    if host not in sys.path:
        sys.path.insert(0, host)
    argv = sys.argv
    sys.argv = ["main.py", "--base-directory", str(base), *host_arguments(has_gpu())]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = argv
        comfy.options.enable_args_parsing(False)


def write_models(base, names=None):
    """Write the tiny model files under base/models and return their paths by name."""
    from . import prompts, tiny_models

    files = {name: Path(base) / "models" / prompts.MODEL_FILES[name] for name in names or prompts.MODEL_FILES}
    for name, path in files.items():
        getattr(tiny_models, f"write_{name}")(path)
    return files
