"""What a user reads: words that were given up are nowhere, and what stands in their place is where it belongs.

The rows are those of a trial of the page by a newcomer: the texts, names, ids and presets that it called wrong or unclear. The
names were decided afterwards; where they differ from what the trial proposed, the row has the decided one.
"""

import ast
import json
import re

import pytest
from support import ROOT

from devtools import locales
from devtools.texts import report

NODE = "nodeDefs.json/TorchCompileKit"
MAIN = "main.json/torchCompileKit"
MODEL = f"{NODE}Model"


def english():
    """Each English text of the page by its path."""
    return {**locales.texts(locales.read("en")), **locales.texts({"report.json": report("en")})}


def strings(code):
    """The texts in Python code, parts of f-strings as well, without docstrings."""
    tree = ast.parse(code)
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, with_docstring)}
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in found if text not in docstrings]


def read(file):
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def everything():
    """All that a user can read, by where it is: texts, schemas, reports, errors, scripts, templates, help pages, README."""
    seen = english()
    for file in (*ROOT.glob("nodes/*.py"), *ROOT.glob("engine/**/*.py")):
        seen[file.relative_to(ROOT).as_posix()] = "\n".join(strings(read(file)))
    for file in ROOT.glob("js/*.js"):
        seen[f"js/{file.name}"] = "\n".join(re.findall(r'"[^"\n]*"|`[^`]*`', re.sub(r"//.*", "", read(file))))
    for file in ROOT.glob("workflows/*.json"):
        graph = json.loads(read(file))
        told = [[node["type"], node.get("title", ""), *(node.get("widgets_values") or [])] for node in graph["nodes"]]
        seen[file.name] = "\n".join(str(text) for texts in told for text in texts)
    pages = [*ROOT.glob("js/docs/*.md"), ROOT / "README.md", *map(ROOT.joinpath, ("docs/guide.md", "docs/troubleshooting.md"))]
    return seen | {page.name: read(page) for page in pages}


# The old words, as a pattern; where the new ones stand, and these.
WORDS = {
    # names
    "Torch Compile": (r"Torch Compile Model\b", f"{MODEL}/display_name", "Torch Compile"),
    "not core's": (r"in the background while images go on", f"{MODEL}/description", "Not core's TorchCompileModel"),
    "VAE Channels Last": (r"TorchCompileKitVAE\b", f"{NODE}VAEChannelsLast/display_name", "VAE Channels Last"),
    "Fix Compiled Keys": (
        r"Repair Compiled File|TorchCompileKitRepair\b",
        f"{NODE}FixKeys/display_name",
        "Fix Compiled Keys (_orig_mod)",
    ),
    "Torch Compile Block Swap": (r"\"Block Swap\"", f"{NODE}BlockSwap/display_name", "Torch Compile Block Swap"),
    "no blueprint": (r"compiled and warm", None, None),
    # inputs and their values
    "compile_when": (
        r"compiles? at once|\"at once\"|in the background /",
        f"{MODEL}/inputs/compile_when/tooltip",
        "before first image: ",
    ),
    "uncompiled linears": (r"eager linears", f"{MODEL}/inputs/block_swap/tooltip", "uncompiled linears"),
    "run uncompiled": (r"run eager", f"{MODEL}/inputs/on_failure/tooltip", "run it uncompiled"),
    "attention": (
        r"auto, host|host's (attention|kernel)",
        f"{MODEL}/inputs/attention/tooltip",
        "flash is PyTorch's, not that of --use-flash-attention",
    ),
    "mode": (
        r"auto records the whole model",
        f"{MODEL}/inputs/mode/tooltip",
        "Leave it on auto, which adds CUDA graphs where they help (SD 1.5, SDXL).",
    ),
    "dynamic": (
        r"one code for every size",
        f"{MODEL}/inputs/dynamic/tooltip",
        "auto, true: compiled once for all sizes. false: compiled again for every size; at most 1 % faster.",
    ),
    "cache_limit": (
        r"compiled variants",
        f"{MODEL}/inputs/cache_limit/tooltip",
        "Only matters with dynamic = false: how many sizes",
    ),
    "blocks_to_swap": (
        r"average blocks' weights",
        f"{NODE}BlockSwap/inputs/blocks_to_swap/tooltip",
        "How much to keep in RAM, counted in blocks. More saves VRAM and costs time.",
    ),
    "description of the VAE": (
        r"as its convolutions want them",
        f"{NODE}VAEChannelsLast/description",
        "Nothing is compiled. Measures both layouts on your first decodes and keeps the faster.",
    ),
    "description of Load": (
        r"blocks compile as ever",
        f"{NODE}LoadCache/description",
        "is ignored, and compiling happens as usual",
    ),
    # lines, notices, the tab, settings
    "placeholder": (r"How it goes|appears here\.", f"{MAIN}/statusHere", "Press Run to see the status."),
    "no 'compiled since'": (r"%\d compiled since", None, None),
    "compiling": (r"images go on(?! uncompiled)", f"{MAIN}/compilingKinds", "compiling %1 kinds of blocks"),
    "faster": (r"steps %\d", f"{MAIN}/faster", "%1 faster (%2 -> %3 s a step)"),
    "slower": (r"%\d slower", f"{MAIN}/slower", "bypass this node, or measure it with Torch Compile Benchmark"),
    "no clear difference": (None, f"{MAIN}/noDifference", "no clear difference"),
    "saved": (r"Gained so far|Lost so far", f"{MAIN}/gained", "Saved so far: %1 s"),
    "lost": (None, f"{MAIN}/lost", "Slower so far: %1 s. Try Torch Compile Benchmark."),
    "blocks compiled": (r"%1 blocks, %2 graphs", f"{MAIN}/blocksFromDisk", "%1 blocks compiled (read from disk)"),
    "the tab explains its words": (
        r"Sampling waits until the code",
        f"{MAIN}/intro",
        "Blocks are the repeated parts of a model.",
    ),
    "the machine": (r"All that compiling needs", f"{MAIN}/machineReady", "Everything that compiling needs is here."),
    "notice": (r"graphs compiled while sampling", "report.json/waited", "Waited %1 s for compiling: %2"),
    "setting of notices": (
        r"Tell when something",
        "settings.json/TorchCompileKit_Notices/name",
        "Notify me when an image had to wait for compiling",
    ),
    "setting of the limit": (
        r"What was not used for longest|goes before it",
        "settings.json/TorchCompileKit_CacheGiB/tooltip",
        "The least recently used is deleted first.",
    ),
    "it does not run on a GPU": (None, f"{MAIN}/leftAsIs", "left as it is: %1"),
    "block swap takes what there is": (
        r"Block Swap failed",
        "report.json/swappedAll",
        "%2 were asked for, and the model has no more",
    ),
    "one word for what a warmup ends with": (r"Warm: ", "report.json/compiledIn", "Compiled in %1 s."),
    # presets
    "Automatic": (None, f"{MAIN}/presetAutomatic", "Automatic"),
    "Ready before the first image": (None, f"{MAIN}/presetReady", "Ready before the first image"),
    "Fastest steps": (None, f"{MAIN}/presetFastest", "Fastest steps (minutes of compiling)"),
    "Low VRAM": (
        r"Little VRAM|Long runs|Quick experiments|First time|Trainer's quick start",
        f"{MAIN}/presetLowVram",
        "Low VRAM",
    ),
    "Find what fails": (r"\(backend aot_eager, mode", f"{MAIN}/presetFind", "Find what fails"),
    # the rest of the trial's list
    "as ever": (r"\bas ever\b", "report.json/noFileChosen", "compiling happens as usual"),
    "before": (
        r"\bbeforehand\b",
        "report.json/addWarmup",
        "To compile before the first image, add Torch Compile Warmup after Torch Compile",
    ),
    "after": (r"(?<!left )\bbehind\b", f"{NODE}SaveCache/description", "Put it after Torch Compile Warmup."),
    "whoever": (r"(^|[.:;] )Who [a-z]", None, None),
    "clauses": (r"that page speaks|stays plain|what hangs on", None, None),
    "paid off": (r"\bpays? back\b", "report.json/paidOffByImage", "paid off by image %2"),
}


@pytest.mark.parametrize("row", WORDS)
def test_words_that_were_given_up_are_nowhere_and_new_ones_in_place(everything, row):
    old, place, new = WORDS[row]
    if old is not None:
        found = {where: hit[0] for where, text in everything.items() if (hit := re.search(old, text, re.MULTILINE))}
        assert not found
    if place is not None:
        assert new in everything[place], everything[place]


def test_readmes_steps_for_the_portable_comfyui_are_what_check_this_machine_says(everything, engine):
    cures, steps = engine("failures.table"), everything["README.md"].partition("**Windows portable**")[2].partition("## Use")[0]
    portable = engine("failures.machine").Machine(
        "Windows", "NVIDIA", (2, 11), (3, 13), None, r"D:\python_embeded", ("Python.h",)
    )
    _, command = portable.cure(cures.NO_TRITON).split(": ")
    assert command.startswith("python_embeded") and f"`{command}`" in steps
    folders = portable.cure(cures.PYTHON_FILES)
    assert (page := re.search(r"https://\S+", folders)[0]) in steps
    assert page.replace("/tag/", "/download/") + "/python_3.13.2_include_libs.zip" in steps
    assert re.search(r"download (\S+)", folders)[1] == "python_3.13..._include_libs.zip"
    for text in ("machine", "machineReady"):
        assert everything[f"{MAIN}/{text}"] in steps


def test_old_words_are_looked_for_wherever_a_user_reads(everything):
    for where in ("engine/failures/table.py", "report.json/warm", "TorchCompileKitModel.md", "README.md"):
        assert everything[where]
    assert "Compiles the model for your sizes" in everything["nodes/warmup.py"]
    assert "Define the node" not in everything["nodes/warmup.py"], "docstrings are not for users"
    assert strings('"""Doc."""\ndef f(x):\n    """Doc."""\n    return f"a {x} b" + "c"') == ["c", "a ", " b"]
    assert "presetReady" in everything["js/presets.js"] and "Settings for a purpose" not in everything["js/presets.js"]
    assert any("Without it (Ctrl+B bypasses it)" in text for text in everything.values()), "notes of templates"


def test_templates_go_from_simple_to_hard_and_no_blueprint_is_left():
    """ComfyUI shows templates by the names of their files."""
    assert [file.name[:9] for file in sorted(ROOT.glob("workflows/*.json"))] == [
        *("1 SDXL wi", "2 Z-Image", "3 Flux wi", "4 Wan 2.1", "5 Qwen-Im")
    ]
    assert not (ROOT / "subgraphs").exists()
