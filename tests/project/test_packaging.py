"""What the registry gets: packed by comfy-cli, as it does it (validated: `python dev.py lint`)."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from support import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A git checkout of the tree as it is, since comfy-cli packs what git tracks."""
    folder = tmp_path_factory.mktemp("checkout") / "torch-compile-kit"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    return folder


def comfy(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_the_zip_holds_what_a_user_needs_and_no_more(checkout):
    result = comfy("node", "pack", cwd=checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = checkout.glob("*.zip")
    names = zipfile.ZipFile(file).namelist()
    for needed in (
        "__init__.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "SECURITY.md",
        "nodes/warmup.py",
        "engine/compile/binding.py",
    ):
        assert needed in names
    assert "js/node_report.js" in names and "js/docs/TorchCompileKitBenchmark.md" in names
    assert {"locales/en/nodeDefs.json", "locales/ja/nodeDefs.json", "locales/zh-TW/main.json"} <= set(names)
    assert "js/docs/TorchCompileKitModel/ja.md" in names
    assert "workflows/Flux with Torch Compile and warmup.json" in names and "js/docs/TorchCompileKitModel.md" in names
    unwanted = [n for n in names if n.startswith(("tests/", "devtools/", "benchmarks/", ".ci/", ".git")) or n == "dev.py"]
    assert not unwanted
