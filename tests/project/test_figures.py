"""The figures that people read are made from the results files, and by nothing else."""

import contextlib
import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import ROOT


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


WHERE = {"device": "a GPU", "comfyui": "0.33", "torch": "2.11", "date": "2026-11-25"}


@pytest.fixture
def measured(benchmark, tmp_path, monkeypatch):
    """A function: a table's results file holds these runs, each its rows and what it says of itself beside `WHERE`."""
    monkeypatch.setattr(benchmark("results"), "RESULTS", tmp_path)

    def write(table, *runs):
        runs = [{"environments": [WHERE | where], "rows": rows} for rows, where in runs]
        (tmp_path / f"{table}.json").write_text(json.dumps({"runs": runs}))

    return write


def test_a_file_that_differs_from_the_results_is_named_and_nothing_is_written(tables, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    for file, content in tables.made().items():
        (tmp_path / file.relative_to(ROOT)).write_text(content, encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    assert tables.stale() == []
    with pytest.raises(SystemExit) as ended:
        tables.main()
    assert not ended.value.code and capsys.readouterr().out == ""
    edited = {}
    for name, made in (("README.md", "<!-- gains -->"), ("docs/speed.svg", "</svg>")):
        text = (tmp_path / name).read_text(encoding="utf-8")
        edited[tmp_path / name] = text.replace(made, f"{made}\n7")
        (tmp_path / name).write_text(edited[tmp_path / name], encoding="utf-8")
    assert tables.stale() == list(map(str, map(Path, ("README.md", "docs/speed.svg"))))
    with pytest.raises(SystemExit) as ended:
        tables.main()
    out = capsys.readouterr().out
    assert ended.value.code and "README.md" in out and "speed.svg" in out and "figures.md" not in out
    assert all(file.read_text(encoding="utf-8") == text for file, text in edited.items())
    monkeypatch.setattr(sys, "argv", ["tables"])
    tables.main()
    assert tables.stale() == []


def test_the_check_needs_neither_pytorch_nor_a_host():
    code = "import sys; sys.modules['torch'] = sys.modules['comfy'] = None; import benchmarks.tables as t; t.stale()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_figure_that_was_edited_by_hand_is_made_anew(tables):
    for file, made in tables.FILES.items():
        text = (ROOT / file).read_text()
        for name, table in made.items():
            around = "" if name in tables.INLINE else "\n"
            begin, end = f"<!-- {name} -->{around}", f"{around}<!-- end {name} -->"
            assert begin + table() + end in text
            if not table():  # sessions that nobody has measured yet
                continue
            edited = text.replace(begin + table(), begin + "7" + table().replace("0", "7"))
            assert edited != text and tables.replace(edited, name, table()) == text


def test_every_reason_to_skip_stands_in_the_table_of_what_was_tested_where(benchmark, tmp_path, monkeypatch):
    compatibility = benchmark("compatibility")
    run = {
        "comfyui": "0.33.0",
        "torch": "2.15.0+cu132",
        "python": "3.12.1",
        "device": "CPU",
        "date": "2026-11-22",
        "part": "core",
        "passed": 7,
        "failed": ["tests.a::b", "tests.a::c"],
        "skipped": {"a GPU has them": 3, "x | y": 1},
    }
    (tmp_path / "compatibility-matrix.json").write_text(json.dumps({"runs": [run]}))
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path)
    assert compatibility.matrix_table().splitlines()[2] == (
        "| 0.33.0 | 2.15.0+cu132 | its core | 7 | 2 | 3: a GPU has them; 1: x \\| y | 2026-11-22, Python 3.12.1, CPU |"
    )


def test_the_number_of_set_ups_and_the_exceptions_are_those_of_the_results(benchmark):
    compatibility = benchmark("compatibility")
    rows = compatibility.outcomes()
    assert len({row["name"] for row in rows}) == len(rows) and all(row["host"] and row["torch"] for row in rows)
    assert {row["name"] for row in rows if not compatibility.keeps_promise(row)} == set(compatibility.EXCEPTIONS)
    named = [setup for family in compatibility.MODELS.values() for setup in family]
    assert sorted(named) == sorted(row["name"] for row in rows) and set(compatibility.SINCE) <= set(named)
    for file in (ROOT / "README.md", ROOT / "docs" / "compatibility.md"):
        assert f"{len(rows)} " in file.read_text().replace("<!-- end set-ups -->", "")


def test_the_chart_shows_the_ratios_of_the_table(benchmark):
    tables_of = benchmark("session_tables")
    ratios = tables_of.prompt_ratios()
    root = ElementTree.fromstring(benchmark("chart").draw(ratios))
    shown = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    beside = tables_of.short_table()
    for name, detail, (kjnodes, ours) in ratios:
        assert {name, detail, f"{ours:.2f}"} <= set(shown)
        told, there = ("KJNodes: no image, ends with an error", "dies") if kjnodes == math.inf else (f"{kjnodes:.2f}",) * 2
        assert told in shown and any(f"| {there} |" in line and f"| **{ours:.2f}** |" in line for line in beside.splitlines())
    assert [group[2][1] for group in ratios] == sorted(group[2][1] for group in ratios)


def test_a_bar_that_does_not_fit_is_cut_and_says_its_number(benchmark):
    draw = benchmark("chart").draw
    root = ElementTree.fromstring(draw([("a model", "20 steps", [5.25, 0.5])]))
    widths = {rect.get("class"): float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")}
    cuts = [line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.get("class") == "cut"]
    assert len(cuts) == 2 and 3 < widths["kjnodes"] / widths["ours"] < 4
    assert "5.25" in [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert 'class="cut"' not in draw([("a model", "20 steps", [1.5, 0.5])])


def test_a_run_is_added_to_the_tables_that_show_its_rows_if_it_says_where_it_comes_from(benchmark, tmp_path, monkeypatch):
    results = benchmark("results")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    kinds = [("session", "flux"), ("table", "flux"), ("session", "flux_small"), ("table", "flux_small"), ("session", "sdxl")]
    run = {
        "environments": [{"device": "a GPU", "comfyui": "0.33", "torch": "2.11", "date": "2026-11-25", "python": "3.12"}],
        "rows": [{"kind": kind, "model": model, "step": n} for n, (kind, model) in enumerate(kinds)],
    }
    results.save(tmp_path / "run.json", run)
    with pytest.raises(ValueError, match=r"lacks command$"):
        results.add(tmp_path / "run.json")
    assert not (tmp_path / "results").exists()
    run["environments"][0]["command"] = "sessions"
    results.save(tmp_path / "run.json", run)
    assert results.add(tmp_path / "run.json") == ["sessions", "table"], "no table shows small models"
    results.add(tmp_path / "run.json")
    rows, sources = results.rows("sessions", "session")
    assert [(row["step"], row["source"]) for row in rows] == [(0, 0), (4, 0), (0, 1), (4, 1)]
    assert sources == ["a GPU, ComfyUI 0.33, PyTorch 2.11, 2026-11-25, `benchmarks/results/sessions.json`"]
    added = json.loads((tmp_path / "results" / "table.json").read_text())["runs"]
    assert added == [{**run, "rows": [run["rows"][1]]}] * 2


def test_the_table_shows_peers_of_the_same_run_and_what_died(benchmark, measured):
    tables = benchmark("session_tables")

    def row(variant, seconds, setup="flux-int8", **more):
        measured = {"seconds": seconds, "step": seconds / 20, "prompts": [{"seconds": 2 * seconds}]} if seconds else {}
        return {"kind": "table", "setup": setup, "variant": variant, "prompts": [], **measured, **more}

    first = [row("eager", 9.0), row("kjnodes", 8.0), row("ours", 7.0)]
    last = [
        row("eager", 5.0, noise={"CUDNN_ATTENTION": 0.0061}, graphs=0, breaks=0),
        row("kjnodes", None, died="OutOfMemoryError: no"),
        row("ours", 4.0, graphs=2, breaks=0, cuda_graphs=1, ready=21.5, error=0.0062, vram_gib=14.21),
        row("eager", 4.0, setup="flux"),  # cut off before ours
    ]
    measured("table", (first, {}), (last, {}))
    assert tables.table_table().splitlines()[2:5] == [
        "| Flux-dev 12B, INT8 ConvRot, 1024x1024, 20 steps | eager | 10.0 | 5.00 | 0.2500 | - | 0 | 0 | - | - | 0.0061 | - |",
        "|  | KJNodes | - | dies: OutOfMemoryError | dies: OutOfMemoryError | in the first | - | - | - | - | - | - |",
        "|  | ours | 8.0 (0.80) | 4.00 (0.80) | 0.2000 (0.80) | 21.5 | 2 | 0 | 1 | 0.0062 | - | 14.2 |",
    ]
    assert tables.short_table().splitlines()[2] == (
        "| Flux-dev 12B, INT8 ConvRot, 1024x1024, 20 steps | 5.0 | dies | **0.80** | 0.250 | dies | **0.80** | 10.0, -, 8.0 |"
    )


def test_readmes_figures_say_what_died_and_what_stays_uncompiled(benchmark, measured):
    tables = benchmark("session_tables")

    def row(setup, variant, seconds, first, graphs=2):
        taken = {"seconds": seconds, "step": seconds / 20} if seconds else {"died": "OutOfMemoryError: no"}
        taken |= {"kind": "table", "ready": 12.3, "graphs": graphs, "vram_gib": 8.5 if variant == "ours" else 8.0}
        return {"setup": setup, "variant": variant, "prompts": [{"seconds": first}] if first else [], **taken}

    compiled = [row("flux", "eager", 4.0, 8.0), row("flux", "kjnodes", None, None), row("flux", "ours", 3.0, 10.0)]
    quick = [
        row("z_image", "eager", 1.0, 2.0),
        row("z_image", "kjnodes", 1.5, 4.0),
        row("z_image", "ours", 1.01, 8.0, graphs=0),
    ]
    measured("table", (compiled, {}), (quick, {}))
    assert tables.gains_table().splitlines()[2:4] == [
        "| Flux-dev 12B, bf16, 1024x1024, 20 steps | 4.00 | dies | **3.00** (-25 %) | 8.0 | - | 10.0 |",
        "| Z-Image 6B, bf16, 1024x1024, 9 steps ¹ | 1.00 | 1.50 | **1.01** (+1 %) | 2.0 | 4.0 | 8.0 |",
    ], "1.0 and 1.0 would not be 1 %"
    assert tables.slowest_first() == "Flux-dev 12B 10.0 s instead of 8.0 s"
    assert tables.where_measured() == "a GPU, ComfyUI 0.33, PyTorch 2.11, 2026-11-25", "one of both runs"
    assert tables.ready_after() == "12 to 12 s" and tables.more_vram() == "0.5 GiB", "of those that were compiled"
    assert tables.gains_in_short() == "Flux-dev 12B 4.0 → 3.0 s an image (-25 %) on one a GPU"
    assert tables.uncompiled_note().startswith("¹ Uncompiled in all prompts that were measured: Z-Image 6B. ")
    assert [name for name, *_ in tables.prompt_ratios()] == ["Flux-dev 12B"], "for the chart"
    measured("table", (compiled, {}))
    assert tables.uncompiled_note() == "" and "¹" not in tables.gains_table()
    replayed = [{**row, "cuda_graphs": 1} for row in quick]
    measured("table", (replayed, {}))
    assert "¹" not in tables.gains_table(), "CUDA graphs of a UNet make it faster before it is compiled"


def test_the_line_in_the_pictures_is_the_nodes_own_with_what_was_recorded_on_a_gpu(benchmark, engine, measured):
    made = benchmark("session_tables")
    where = {"date": "2026-11-26", "device": "NVIDIA H200", "torch": "2.11.0", "comfyui": "0.33.0"}
    flux = {"kind": "ready", "model": "flux", "pack": "new", "eager": {"step": 0.1756}, "step_after": 0.1331}
    flux["prompts"] = [{"steps": [0.13] * 20}]
    rows = [{**flux, "model": "sdxl"}, flux, {**flux, "pack": "older", "step_after": 0.9}]
    measured("ready", ([{**flux, "step_after": 0.1}], where), (rows, where))

    status = engine("messages.status")
    steps = status.Steps()
    for seconds, where in ((0.1756, steps.uncompiled), (0.1331, steps.fast)):
        where.extend([seconds] * status.FEWEST)
    state, says = steps.compared()
    line = made.recorded_line()
    assert line == status.News(state, status.told("readyBut", says))._asdict() and line["state"] == "faster"
    where = "Flux-dev 12B, 1024x1024, bf16, 20 steps on NVIDIA H200, ComfyUI 0.33.0, PyTorch 2.11.0, 2026-11-26"
    assert made.recorded_where() == where


def test_seconds_have_the_digits_that_their_percentages_need(benchmark):
    tables = benchmark("session_tables")
    shown = re.findall(r"\| ([\d.]+) \|[^*\n]*\*\*([\d.]+)\*\* \(([-+]\d+) %\)", tables.gains_table())
    shown += re.findall(r"([\d.]+) → ([\d.]+) s an image \((-\d+) %\)", tables.gains_in_short())
    assert len(shown) == len(tables.README_SETUPS) + 2
    assert [f"{float(after) / float(before) - 1:+.0%}" for before, after, _ in shown] == [
        f"{percent}%" for *_, percent in shown
    ]
    for eager, ours, digits in ((4.0, 3.0, 1), (3.95, 3.14, 2), (0.7049, 0.6951, 3)):
        assert tables._digits([(None, {"eager": {"seconds": eager}, "ours": {"seconds": ours}})]) == digits


def test_rows_say_the_size_and_precision_that_models_have(benchmark):
    tables, models = benchmark("session_tables"), benchmark("models").MODELS
    for setup in tables.SETUPS.values():
        width, height, frames = models[setup.model].size
        size = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        dtype = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(models[setup.model].dtype)]
        assert f", {size}, " in tables._row_title(setup), setup.name
        assert (f", {dtype}, " in tables._row_title(setup)) == (setup.weights == "default")


def test_a_soak_sees_what_grows(benchmark):
    flat = benchmark("soak").flat
    assert flat("rss", [1000, 1100, 1150, 1150]) and not flat("rss", [1000, 1100, 1120, 1160])
    assert flat("files", [9, 10, 12]) and not flat("files", [9, 10, 13])
    assert flat("vram", [130.0, 131.0, 131.4]) and not flat("vram", [130.0, 131.0, 131.6])


def test_noise_of_attention_is_shown_where_a_row_has_it(benchmark):
    tables = benchmark("results")
    assert tables.noise_of({"noise": {"MATH": 0.25, "FLASH_ATTENTION": 0.5}}) == 0.5
    assert tables.noise_of({"variant": "eager"}) is None


def _session(model: str, variant: str, seconds: list[float], cache: str = "cold", cores: int = 0, **more) -> list[dict]:
    names = ["first image", "next seed", "next"]
    common = {"kind": "session", "model": model, "variant": variant, "cache": cache, "cores": cores, "free_gib": 0, **more}
    return [
        {**common, "number": n, "prompt": names[n - 1], "seconds": s, "longest_step": s / 2, "steps": [s / 2, 0.5, 0.5]}
        for n, s in enumerate(seconds, 1)
    ]


def test_sessions_are_set_beside_eagers_prompts_of_the_same_run(benchmark, measured):
    sessions = benchmark("session_tables")
    assert sessions.sessions_table() == "" == sessions.prompts_table()
    ours = [*_session("flux", "ours", [8, 2, 2]), *_session("flux", "ours", [2, 2, 2], "warm")]
    few = [*_session("flux", "eager", [5, 5, 5], cores=4), *_session("flux", "ours", [10, 5, 5], cores=4)]
    # Eager once more, elsewhere: its seconds are newer, but no measure for rows of another run.
    cut = _session("flux", "kjnodes", [16, 8])
    elsewhere = [*_session("flux", "eager", [8, 8, 8]), *cut, *_session("flux_small", "eager", [1, 1, 1])]
    measured("sessions", ([*_session("flux", "eager", [4, 4, 4]), *ours, *few], {}), (elsewhere, {"date": "2026-11-26"}))
    lines = sessions.sessions_table().splitlines()
    assert lines[2] == "| Flux-dev 12B, 1024x1024, 3 prompts | eager | 8.0 | 24.0 | - | 8.0 |"
    assert lines[3] == "|  | KJNodes | 16.0 (2.00) | 24.0 (1.50), 2 prompts | - | - |"
    assert lines[4] == "|  | ours | 8.0 (2.00) | 12.0 (1.00) | 6.0 (0.50) | 2.0 (0.50) |"
    assert len([line for line in lines if line.startswith("|")]) == 5

    prompts = sessions.prompts_table()
    assert "| first image | 8.0, 4 | 16.0 (2.00), 8 | 8.0 (2.00), 4 | 2.0 (0.50), 1 |" in prompts
    assert "| Flux-dev 12B, 1024x1024, 4 cores | eager | ours, cold |" in prompts
    # Eager's usual step is 0.5 s: the first steps of 4 s and 8 s are more than three of them.
    assert "| steps over 3 of eager's | 3 | 2 | 1 | 0 |" in prompts

    packed = [*_session("flux", "eager", [6, 6], weights="gguf"), *_session("flux", "ours", [3, 3], weights="gguf")]
    measured("sessions", ([*_session("flux", "eager", [4, 4, 4]), *ours, *packed], {}))
    firsts = [line.split(" | ")[:3] for line in sessions.sessions_table().splitlines() if line.startswith("|")][2:]
    assert firsts[0] == ["| Flux-dev 12B, 1024x1024, 3 prompts", "eager", "4.0"]
    assert firsts[2] == ["| Flux-dev 12B, 1024x1024, GGUF Q4_K, 2 prompts", "eager", "6.0"]


@pytest.mark.parametrize("free", [0, 8])
def test_servers_with_little_memory_do_not_share_it(benchmark, monkeypatch, tmp_path, free):
    """The first one would keep what it has filled."""
    sessions, log = benchmark("sessions"), []

    class Bench(sessions.Bench):
        def __init__(self):
            self.options = types.SimpleNamespace(
                prompts=[1, 2], free=free, weights="default", variants=["ours", "eager"], kjnodes=None
            )
            self.known = {"rows": []}

        @contextlib.contextmanager
        def paused(self, variant, *_, **__):
            log.append(f"{variant} starts")
            yield types.SimpleNamespace(post=lambda *_: log.append(f"{variant} fills"))
            log.append(f"{variant} ends")

        def _prompt(self, _server, about, _prompt):
            log.append(f"{about['variant']} {about['number']}")
            return {**about, "died": ""}

        left = clear = save = lambda *_: None

    monkeypatch.setattr(sessions, "at_work", contextlib.nullcontext)
    Bench().session("sd15", "cold", 0)
    if free:
        assert log == [f"{v} {w}" for v in ("ours", "eager") for w in ("starts", "fills", "1", "2", "ends")]
    else:
        assert [entry for entry in log if entry[-1].isdigit()] == ["ours 1", "eager 1", "ours 2", "eager 2"]


def test_a_variant_that_died_shows_it_and_gives_no_sum(benchmark, measured):
    sessions = benchmark("session_tables")
    core = _session("sdxl", "core", [9, 9, 9])
    core[1] = {k: v for k, v in core[1].items() if k not in ("seconds", "steps", "longest_step")}
    core[1]["died"] = "OutOfMemoryError: no memory"
    measured("sessions", ([*_session("sdxl", "eager", [3, 3, 3]), *core], {}))
    line = sessions.sessions_table().splitlines()[3]
    assert line == "|  | core | 9.0 (3.00) | dies: OutOfMemoryError | - | 9.0 (3.00) |"
    assert "| next seed | 3.0, 1.5 | dies: OutOfMemoryError |" in sessions.prompts_table()


def test_a_session_sends_only_inputs_that_the_servers_node_has(benchmark):
    prompts = benchmark("sessions")
    node = {"input": {"required": {"model": ["MODEL"], "mode": ["COMBO", {"options": ["default", "other"]}]}}}
    node["input"]["optional"] = {"threads": ["INT", {"default": 4}], "old": [["a", "b"]]}
    node["input_order"] = {"required": ["model", "mode"], "optional": ["threads", "old"]}
    assert prompts.widgets(node) == {"mode": "default", "threads": 4, "old": "a"}
    given = {"mode": "other", "compile_when": "before first image"}
    assert prompts.settings_for({prompts.MODEL_NODE: node}, given) == {"mode": "other"}


def test_the_tables_have_a_column_for_cores_node_where_a_run_has_measured_it_and_else_none(benchmark, monkeypatch):
    tables_of = benchmark("session_tables")
    everything, sources = tables_of.rows("table", "table")
    # Tables are made of the newest run of each set-up: one has core's node, the other lacks it.
    only = {"source": "a run of all four", "setup": "sdxl", "device": "a GPU", "command": "table"}
    known = [row for row in everything if row["setup"] == "flux" and row["variant"] in ("eager", "kjnodes", "ours")]
    new = [
        {**only, "kind": "table", "variant": variant, "seconds": seconds, "step": seconds / 25, "prompts": [{"seconds": first}]}
        for variant, seconds, first in (("eager", 2.0, 5.0), ("core", 3.0, 30.0), ("kjnodes", 1.5, 20.0), ("ours", 1.0, 6.0))
    ]
    made = (tables_of.gains_table, tables_of.short_table, tables_of.table_table)
    monkeypatch.setattr(tables_of, "rows", lambda *_: (known, sources))
    for table in made:
        assert "core" not in table(), table.__name__
    monkeypatch.setattr(tables_of, "rows", lambda *_: ([*known, *new], sources))
    gains, short, whole = (table() for table in made)
    assert "core" not in gains, "the README's: where each of its rows has it"
    assert "| SDXL, fp16, 1024x1024, 25 steps | 2.0 | 1.50 | 0.75 | **0.50** |" in short and "| 5.0, 30.0, 20.0, 6.0 |" in short
    assert "|  | core | 30.0 (6.00) | 3.00 (1.50) | 0.1200 (1.50) | in the first |" in whole
    assert re.search(r"\| Flux-dev 12B, bf16, 1024x1024, 20 steps \| [\d.]+ \| - \| ", short), "a run that lacks it"
    monkeypatch.setattr(tables_of, "rows", lambda *_: (new, sources))
    row = "| SDXL, fp16, 1024x1024, 25 steps | 2.0 | 3.0 | 1.5 | **1.0** (-50 %) | 5.0 | 30.0 | 20.0 | 6.0 |"
    assert row in tables_of.gains_table()


def test_the_table_of_parts_shows_the_newest_run_of_each_and_says_where_nothing_was_measured(benchmark, measured):
    tables = benchmark("figure_tables")

    def row(setup, variant, step, **more):
        part, model = setup.split("-")
        taken = {"step": step, "seconds": 10 * step, "first": 2 * step, "vram_gib": 8.0} if step else {}
        return {"kind": "part", "part": part, "setup": setup, "model": model, "variant": variant, **taken, **more}

    assert tables.parts_table() == tables.short_parts_table() == tables.NOT_MEASURED
    old = [row("vae-sdxl", "eager", 9.0), row("vae-sdxl", "ours", 9.0, error=0.5)]
    old += [row("controlnet-flux", "eager", 9.0), row("controlnet-flux", "kjnodes", 9.0)]
    new = [row("vae-sdxl", "eager", 0.2), row("vae-sdxl", "kjnodes", 0.15, error=0.01)]
    new += [row("vae-sdxl", "ours", 0.1, error=0.002)]
    new += [row("controlnet-flux", "eager", 0.4), row("controlnet-flux", "model", 0.3), row("controlnet-flux", "both", 0.2)]
    new += [row("training-flux", "eager", 0.8, attention="MATH")]
    new += [row("training-flux", "ours", None, died="OutOfMemoryError: no")]
    new += [row("vae-flux", "eager", None)]  # not finished
    measured("parts", (old, {}), (new, {}))
    assert tables.parts_table().splitlines()[2:5] == [
        "| VAE: SDXL, 1024x1024, cfg 5 | a decode | 0.2 | 0.15 (0.75) | - | 0.1 (0.50) | 2.00, 1.50, 1.00 | 0.4, 0.3, 0.2 "
        "| -, 0.01, 0.002 | 8.0, 8.0, 8.0 |",
        "| ControlNet: Flux-dev 12B, 1024x1024 | a step | 0.4 | - | 0.3 (0.75) | 0.2 (0.50) | 4.00, 3.00, 2.00 | 0.8, 0.6, 0.4 "
        "| -, -, - | 8.0, 8.0, 8.0 |",
        "| Train LoRA: Flux-dev 12B, 1024x1024, uncompiled with MATH | a step | 0.8 | - | - | dies: OutOfMemoryError | 8.00, - "
        "| 1.6, - | -, - | 8.0, - |",
    ]
    shares = [line.split(" | ")[2] for line in tables.short_parts_table().splitlines()[2:]]
    assert shares == ["a decode: SDXL 0.50", "a step: Flux-dev 12B 0.50", "a step: Flux-dev 12B -"]
