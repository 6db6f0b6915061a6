"""Make the archive that the registry gets, with comfy-cli, of the tree as it is."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from support import ROOT


def comfy(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def pack(folder: Path) -> zipfile.ZipFile:
    """What `comfy node pack` makes of a git checkout of the tree, since comfy-cli packs what git tracks."""
    folder = folder / "torch-compile-kit"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    result = comfy("node", "pack", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = folder.glob("*.zip")
    return zipfile.ZipFile(file)
