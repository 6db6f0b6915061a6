"""Parts of the suite: its core, for every ComfyUI, what a newer ComfyUI or PyTorch can break, and what is quick."""

from .commands import ROOT

CORE = ["host/model/test_integrity", "host/weights/test_lora", "host/weights/test_blocks"]
# At most three minutes on two cores.
QUICK = ["tests/engine", "tests/project", "tests/host/test_adapter.py", "tests/host/model/test_models.py"]
# Minutes of compiling that say little about a host.
LONG = "with_and_without_warmup and not flux"
# These page weights in another way than 0.26 and later: their layers stay eager, and the tests of placing pages do not apply.
WITHOUT_PAGES = {"0.18.2", "0.16.3"}

# The newest versions get every file but these, so that a new one is among them; at most 12 minutes on two cores.
NOT_NEWEST = {
    # nothing of the host or of PyTorch
    "project/test_figures",
    "project/test_packaging",
    "project/test_setup",
    "project/test_style",
    "engine/benchmark/test_figures",
    # the same code as in others, at more places
    "host/test_sweep",
    "host/model/test_unsound",
    "host/nodes/test_benchmark",
    # minutes in Chromium
    "server/test_browser",
    # many starts of a process
    "faults/test_faults",
    "server/test_cache",
    "server/test_prepare",
    "server/test_warm",
    # other hosts
    "host/test_older_hosts",
}


def newest():
    """The files that newer versions can break, below tests/ and without their suffix."""
    tests = ROOT / "tests"
    found = {file.relative_to(tests).with_suffix("").as_posix() for file in tests.rglob("test_*.py")}
    return sorted(found - NOT_NEWEST)


def arguments(part, version):
    """What pytest gets for a part ("whole", "first", "rest", "quick", "core" or "newest") on that ComfyUI."""
    if part == "whole":
        return []
    if part in ("first", "rest"):
        return ["-m", "rest" if part == "rest" else "not rest"]
    if part == "quick":
        return ["-m", "not rest", *QUICK]
    if part == "newest":
        return [f"tests/{name}.py" for name in newest()]
    without_pages = ["-m", "not pages"] if version in WITHOUT_PAGES else []
    return ["-k", f"not ({LONG})", *without_pages, *(f"tests/{name}.py" for name in CORE)]


def left_out(part, version):
    """What is off on that ComfyUI so that its tests are not even chosen, in words."""
    if part == "core" and version in WITHOUT_PAGES:
        return ["dynamic VRAM: layers that are paged run eager"]
    return []
