"""Pack ComfyUI and what it requires into one archive, for a machine with a GPU and PyTorch but without a package registry.

python -m devtools.kit FILE.tar.xz     # 54 MB; there:
mkdir /tmp/kit && tar xJf FILE.tar.xz -C /tmp/kit
export COMFYUI_PATH=/tmp/kit/comfyui PYTHONPATH=/tmp/kit/site PYTHONPYCACHEPREFIX=/tmp/pyc
python3 -m pytest --confcutdir=tests -m gpu tests/test_gpu_sessions.py
python3 -m benchmarks.sessions --host $COMFYUI_PATH --folder /dev/shm/sessions --out sessions.json
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from . import hosts

# Packages that ComfyUI, the tests of sessions and the benchmarks import beside PyTorch, numpy, transformers and aiohttp.
WHEELS = (
    "torchsde", "trampoline", "einops", "av", "spandrel", "simpleeval", "blake3", "websocket-client", "alembic", "mako",
    "sqlalchemy", "greenlet", "pydantic==2.12.5", "pydantic-core==2.41.5", "pydantic-settings", "python-dotenv",
    "typing-inspection", "annotated-types",
)  # fmt: skip
PINNED = re.compile(r"^comfy-(?:kitchen|aimdo)==.*", re.MULTILINE)


def pack(archive: Path, version: str, python: str) -> None:
    comfyui = hosts.host_folder(version, sys.executable)
    pinned = PINNED.findall((comfyui / "requirements.txt").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        tags = [f"--abi=cp{python.replace('.', '')}", "--abi=abi3", "--abi=none", "--platform=any"]
        tags += [f"--platform=manylinux{name}_x86_64" for name in ("1", "2014", "_2_17", "_2_27", "_2_28")]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"--dest={wheels}"]
        subprocess.run([*command, f"--python-version={python}", *tags, *pinned, *WHEELS], check=True)
        for wheel in wheels.iterdir():
            zipfile.ZipFile(wheel).extractall(site)
        for amd in site.glob("comfy_kitchen/backends/hip/*.so"):
            amd.unlink()
        shutil.copytree(comfyui, Path(folder, "comfyui"))
        for vocabulary in Path(folder, "comfyui", "comfy", "text_encoders").glob("*_tokenizer"):
            shutil.rmtree(vocabulary)  # no prompt of ours has a text encoder
        with tarfile.open(archive, "w:xz", preset=9) as packed:
            for part in ("site", "comfyui"):
                packed.add(Path(folder, part), part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--comfyui", default=hosts.NEWEST[0], help="a version (%(default)s)")
    parser.add_argument("--python", default="3.12", help="the version there (%(default)s)")
    options = parser.parse_args()
    pack(options.archive, options.comfyui, options.python)
