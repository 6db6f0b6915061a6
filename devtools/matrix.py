"""Record in a results file how tests ended on one ComfyUI with one PyTorch, for the compatibility table."""

import ast
import datetime
import json
import subprocess
from xml.etree import ElementTree

from . import hosts
from .commands import DEV, ROOT

RESULTS = ROOT / "benchmarks" / "results" / "compatibility-matrix.json"
# Run in the environment that the tests had.
PROBE = """
import importlib.metadata as m, json, platform, torch
packages = {}
for name in ("torchvision", "torchaudio", "triton", "comfy-kitchen", "comfy-aimdo"):
    try: packages[name] = m.version(name)
    except m.PackageNotFoundError: packages[name] = "none"
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(json.dumps(dict(torch=torch.__version__, python=platform.python_version(), device=device, packages=packages)))
"""


def outcome(junit):
    """How the tests of a JUnit XML file ended: {"passed": count, "failed": names, "skipped": {reason: count}}."""
    passed, failed, skipped = 0, set(), {}
    for case in ElementTree.parse(junit).iter("testcase"):
        # A test that fails and then fails to clean up has two entries of one name.
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message") or "no reason given"
            if reason == "collection skipped":
                # The text is a tuple: file, line, 'Skipped: ' and the reason.
                reason = f"{name}: {ast.literal_eval(skip.text.strip())[2].removeprefix('Skipped: ')}"
            if skip.get("type") == "pytest.xfail":
                reason = f"fails as expected: {reason}"
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(sorted(skipped.items()))}


def _pair(run):
    """The key of a run: a later run replaces an earlier one with the same key."""
    return run["comfyui"], run["torch"].split(".")[:2], run["part"]


def _order(run):
    torch = run["torch"].partition("+")[0]
    return *([-int(n) for n in version.split(".")] for version in (run["comfyui"], torch)), run["part"]


def merge(file, run):
    """Put a run into the results file, in the place of an earlier one of the same ComfyUI, PyTorch and part."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    runs = sorted([*(other for other in runs if _pair(other) != _pair(run)), run], key=_order)
    file.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def record(junit, python, host, part, command):
    """Put the outcome of this part's tests into the results file, and print it."""
    version = hosts.version_in(host)
    about = json.loads(subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True).stdout)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    run = {
        "comfyui": version,
        **about,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": command,
        "part": part,
        **outcome(junit),
    }
    merge(RESULTS, run)
    print(
        f"{RESULTS.relative_to(ROOT)}: ComfyUI {version}, PyTorch {run['torch']}, {part}: {run['passed']} passed, "
        f"{len(run['failed'])} failed, {sum(run['skipped'].values())} skipped. Table: python -m benchmarks.tables"
    )


def junit_file(part):
    """The file that pytest is told to write; an earlier run's is removed."""
    file = DEV / f"matrix-{part}.xml"
    file.unlink(missing_ok=True)
    return file
