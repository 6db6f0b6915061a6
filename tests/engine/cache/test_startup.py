"""What is done while a model loads for somebody who will wait: less where graphs will be read from disk."""

import pytest


@pytest.fixture
def prepare(engine, monkeypatch):
    """The module with its steps noted instead of done, as in a process that has prepared nothing."""
    module, done = engine("cache.startup"), []
    for name in ("_import_inductor", "_compute_keys", "_start_triton", "start_workers", "_trim"):
        monkeypatch.setattr(module, name, lambda name=name: done.append(name))
    monkeypatch.setattr(module._Preparation, "thread", None)
    return module, done


class Cache:
    def __init__(self, current):
        self.has_current = lambda: current


def test_all_of_it_where_nothing_was_ever_compiled(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "current", lambda: Cache(False))
    module.prepare(on_gpu=True)
    module.wait_until_prepared()
    assert done == ["start_workers", "_import_inductor", "_compute_keys", "_start_triton", "_trim"]
    module.prepare(on_gpu=True)
    module.wait_until_prepared()
    assert len(done) == 5, "once a process"


def test_after_a_restart_graphs_are_read(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "current", lambda: Cache(True))
    module._run(True, lambda: None)
    assert done == ["_import_inductor", "_compute_keys", "_start_triton", "_trim"], "workers would take the processor"


def test_without_a_gpu_there_is_no_triton(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "current", lambda: None)
    module._run(False, lambda: None)
    assert done == ["_import_inductor", "_compute_keys", "_trim"]


def test_a_step_that_fails_stops_nothing(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "current", lambda: None)
    monkeypatch.setattr(module, "_compute_keys", lambda: 1 / 0)
    module._run(True, lambda: None)
    assert done[-1] == "_trim" and "_start_triton" in done
