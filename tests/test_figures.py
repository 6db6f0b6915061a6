"""The figures that people read are made from the results files, and by nothing else."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def benchmark():
    """A function: benchmark("tables") is benchmarks/tables.py; by its path, since ROOT is not on sys.path here."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture
def tables(benchmark):
    return benchmark("tables")


def test_readme_chart_and_compatibility_are_what_the_results_files_make(tables):
    made = tables.made()
    assert {file.name for file in made} == {"README.md", "figures.md", "step-time.svg", "compatibility.md"}
    for file, content in made.items():
        assert file.read_text() == content, f"{file.name} is not what `python -m benchmarks.tables` writes"
    assert "docs/step-time.svg" in made[ROOT / "README.md"]


def test_a_figure_that_was_edited_by_hand_is_made_anew(tables):
    for file, made in (("README.md", tables.README), ("docs/figures.md", tables.FIGURES)):
        text = (ROOT / file).read_text()
        for name, table in made.items():
            around = "" if name in tables.INLINE else "\n"
            begin, end = f"<!-- {name} -->{around}", f"{around}<!-- end {name} -->"
            assert begin + table() + end in text
            edited = text.replace(begin + table(), begin + "7" + table().replace("0", "7"))
            assert edited != text and tables.replace(edited, name, table()) == text


def test_the_number_of_set_ups_and_the_exceptions_are_those_of_the_results(tables):
    rows = tables.outcomes()
    assert len({row["name"] for row in rows}) == len(rows) and all(row["host"] and row["torch"] for row in rows)
    assert {row["name"] for row in rows if not tables.keeps_promise(row)} == set(tables.EXCEPTIONS)
    for file in (ROOT / "README.md", ROOT / "docs" / "compatibility.md"):
        assert f"{len(rows)} " in file.read_text().replace("<!-- end set-ups -->", "")


def test_the_chart_shows_the_ratios_of_the_table_beside_it(tables):
    root = ElementTree.fromstring(tables.step_time_chart())
    shown = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    eager, ours = tables._newest_pair(tables.rows("step_time")[0], "qwen_image")
    assert f"{ours['step'] / eager['step']:.2f}" in shown
    beside = next(line for line in tables.step_time_table().splitlines() if line.startswith("| Flux-dev 12B, 1024"))
    _, _, _, ours, kjnodes, core, *_ = beside.split("|")
    for ratio in (ours.partition("(")[2].partition(")")[0], kjnodes.strip(), core.strip()):
        assert float(ratio) and ratio in shown


def test_every_results_file_says_where_it_comes_from(tables):
    for file in tables.RESULTS.glob("*.json"):
        content = json.loads(file.read_text())
        if file.name == "compatibility.json":
            continue
        for where in content["environments"]:
            assert {"date", "device", "torch", "python", "comfyui", "command"} <= set(where), file.name


def test_noise_of_attention_is_shown_where_a_row_has_it(tables):
    assert tables.noise_of({"attention_noise": {"MATH": 0.25, "FLASH_ATTENTION": 0.5}}) == 0.5
    assert tables.noise_of({"variant": "eager"}) is None and tables.noise_of(None) is None


@pytest.mark.host
def test_noise_is_read_for_every_kernel_that_can_run(benchmark, monkeypatch):
    import torch
    from torch.nn.attention import SDPBackend

    noise, session = benchmark("noise"), benchmark("session")
    monkeypatch.setitem(sys.modules, session.KIT, None)
    session._load_kit()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    never = SDPBackend.OVERRIDEABLE  # of other devices than these two
    monkeypatch.setitem(noise.KERNELS, device, (never, SDPBackend.MATH))
    patcher = benchmark("models").build("flux_small", torch.device(device))
    before = dict(patcher.model_options["transformer_options"])
    expected, _ = session.sample(patcher, "flux_small", 2)
    found = noise.attention_noise(patcher, "flux_small", 2, device, expected)
    assert list(found) == ["MATH"] and 0 < found["MATH"] < 1e-3
    assert patcher.model_options["transformer_options"] == before
