"""What a user reads: words that were given up are nowhere, and what stands in their place is where it belongs."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from support import ROOT

from devtools import locales
from devtools.texts import report

MAIN = "main.json/torchCompileKit"


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


# Of each row the old words, as a pattern; where the new ones stand, and these.
WORDS = yaml.safe_load(read(Path(__file__).with_name("wording.yaml")))


@pytest.mark.parametrize(("old", "place", "new"), WORDS)
def test_words_that_were_given_up_are_nowhere_and_new_ones_in_place(everything, old, place, new):
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
