"""Parts of the suite, by file: its core, for every ComfyUI, and what a newer ComfyUI or PyTorch can break."""

from .commands import ROOT

CORE = ["test_host_integrity", "test_host_lora", "test_host_weights"]
# Minutes of compiling that say little about a host.
LONG = "with_and_without_warmup and not flux"
# These page weights in another way than 0.26 and later: their layers stay eager, and the tests of placing pages do not apply.
WITHOUT_PAGES = {"0.18.2", "0.16.3"}

# The newest versions get every file but these, so that a new one is among them; at most 12 minutes on two cores.
NOT_NEWEST = {
    # nothing of the host or of PyTorch
    "test_figures",
    "test_packaging",
    "test_setup",
    "test_style",
    "test_engine_benchmark",
    # the same code as in others, at more places
    "test_sweep",
    "test_host_unsound",
    "test_host_benchmark",
    # many starts of a server
    "test_server_cache",
    "test_server_prepare",
    "test_server_warm",
    # other hosts
    "test_older_hosts",
}


def newest():
    """The names of the files that newer versions can break."""
    return sorted({file.stem for file in (ROOT / "tests").glob("test_*.py")} - NOT_NEWEST)


def arguments(part, version):
    """What pytest gets for a part ("whole", "core" or "newest") on that ComfyUI."""
    if part == "whole":
        return []
    if part == "newest":
        return [f"tests/{name}.py" for name in newest()]
    without_pages = ["-m", "not pages"] if version in WITHOUT_PAGES else []
    return ["-k", f"not ({LONG})", *without_pages, *(f"tests/{name}.py" for name in CORE)]


def left_out(part, version):
    """What is off on that ComfyUI so that its tests are not even chosen, in words."""
    if part == "core" and version in WITHOUT_PAGES:
        return ["dynamic VRAM: layers that are paged run eager"]
    return []
