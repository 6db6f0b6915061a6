"""What is done before the first compilation, beside a model that loads or while the server is idle."""

import pytest


@pytest.fixture
def prepare(engine, monkeypatch):
    """The module with its steps noted instead of done, as in a process that has prepared nothing."""
    module, done = engine("cache.startup"), []
    for name in ("start_workers", "import_inductor"):
        monkeypatch.setattr(module, name, lambda name=name: done.append(name))
    monkeypatch.setattr(module, "_thread", None)
    monkeypatch.setattr(module, "_begun", set())
    return module, done


def test_each_step_once_a_process(prepare):
    module, done = prepare
    module.prepare(module.import_inductor)
    for _ in range(2):
        module.prepare(module.start_workers, module.import_inductor)
        module.wait_until_prepared()
    assert done == ["import_inductor", "start_workers"]


def test_the_log_says_what_each_step_took(prepare, caplog):
    def first():
        pass

    module, _ = prepare
    with caplog.at_level("DEBUG", "torch-compile-kit"):
        module.prepare(first)
        module.wait_until_prepared()
    assert "first: " in caplog.text, "tests/server/test_prepare.py waits for such a line, benchmarks/steps.py shows it"


def test_a_step_that_fails_stops_nothing(prepare, monkeypatch):
    module, done = prepare
    monkeypatch.setattr(module, "import_inductor", lambda: 1 / 0)
    module.prepare(module.import_inductor, module.start_workers)
    module.wait_until_prepared()
    assert done == ["start_workers"]


def test_pytorch_is_asked_to_start_its_workers_and_not_waited_for(engine, monkeypatch):
    from torch._inductor import async_compile

    asked = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: asked.append("start"))
    monkeypatch.setattr(async_compile.AsyncCompile, "wait_pool_ready", classmethod(lambda *_: asked.append("wait")))
    engine("cache.startup").start_workers()
    assert asked == ["start"]
