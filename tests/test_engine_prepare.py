"""What is done while the model loads: the rest is left out when somebody waits, and where graphs will be read from disk."""

import pytest


@pytest.fixture
def prepare(engine, monkeypatch):
    """The module with its steps noted instead of done, as in a process that has prepared nothing."""
    module, done = engine("prepare"), []
    for name in ("_import_inductor", "_compute_keys", "_read_sources", "_start_triton", "start_workers", "_probe_cpu", "_trim"):
        monkeypatch.setattr(module, name, lambda name=name: done.append(name))
    monkeypatch.setattr(module, "_importing", lambda name: lambda: done.append("import"))
    monkeypatch.setattr(module._Preparation, "wanted", False)
    monkeypatch.setattr(module._Preparation, "imported", None)
    monkeypatch.setattr(module, "_recorded", lambda _name: set())
    return module, done


def test_all_of_it_where_nothing_was_ever_compiled(prepare):
    module, done = prepare
    module._run(True)
    assert done[:5] == ["start_workers", "_import_inductor", "_compute_keys", "_read_sources", "_start_triton"]
    assert done[5:] == ["import"] * len(module.LATE_IMPORTS) + ["_trim"]


def test_the_rest_waits_for_the_compilation_when_that_has_come(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "_importing", lambda _name: lambda: (done.append("import"), module.wait_until_prepared()))
    monkeypatch.setattr(module._Preparation, "thread", None)
    module._run(True)
    assert done[-3:] == ["_start_triton", "import", "_trim"]


def test_after_a_restart_graphs_are_read(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "_is_restart", lambda: True)
    module._run(True)
    assert done[0] == "_import_inductor" and done[-2:] == ["_start_triton", "_trim"]
    assert "start_workers" not in done, "they would take the processor from the first images"


def test_without_a_gpu_there_is_no_triton(prepare):
    module, done = prepare
    module._run(False)
    assert done == ["_import_inductor", "_compute_keys", "_probe_cpu", "_read_sources", "_trim"]


def test_sources_that_arrive_later_are_read_before_compiling(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "_record", lambda *_: None)
    monkeypatch.setattr(module._Preparation, "thread", None)
    module.prepare(on_gpu=False)
    module.wait_until_prepared()
    done.clear()
    module.expect_modules(["json"])
    module.wait_until_prepared()
    assert done == ["_read_sources"]


def test_a_step_that_fails_stops_nothing(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "_compute_keys", lambda: 1 / 0)
    module._run(True)
    assert done[-1] == "_trim" and "_start_triton" in done


def test_what_is_imported_early_exists(engine):
    import importlib.util

    names = engine("prepare").FIRST_IMPORTS | set(engine("prepare").LATE_IMPORTS)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert not missing
