"""New kernels are measured briefly, in the calls of our own compiled blocks and nowhere else."""

import pytest
import torch
from support import CompiledNet, Net, nothing


@pytest.fixture
def benchmarker(monkeypatch):
    """Inductor's class with the arguments of `benchmark_gpu` noted instead of used: here is no GPU to measure."""
    from torch._inductor.runtime import benchmarking

    asked = []
    monkeypatch.setattr(benchmarking.InductorBenchmarker, "benchmark_gpu", lambda _self, kernel, **kwargs: asked.append(kwargs))
    return benchmarking.InductorBenchmarker, asked


def test_what_the_caller_leaves_open_is_less(engine, benchmarker):
    cls, asked = benchmarker
    tuning = engine("inductor.kernel_tuning")
    before = cls.__dict__["benchmark_gpu"]
    with tuning.tuning_scope.applied(benchmark=tuning.brief_benchmark()):
        cls().benchmark_gpu(nothing, rep=40)
        cls().benchmark_gpu(nothing, benchmark_iters=7)
    cls().benchmark_gpu(nothing, rep=40)
    assert asked == [{**tuning.BRIEF, "rep": 40}, {**tuning.BRIEF, "benchmark_iters": 7}, {"rep": 40}]
    assert cls.__dict__["benchmark_gpu"] is before


def test_pytorch_has_the_arguments(engine):
    import inspect

    from torch._inductor.runtime.benchmarking import InductorBenchmarker

    accepted = inspect.signature(InductorBenchmarker.benchmark_gpu).parameters
    assert set(engine("inductor.kernel_tuning").BRIEF) <= set(accepted)


@pytest.mark.parametrize("fails", [False, True])
def test_it_holds_for_the_first_run_of_new_code_only(engine, benchmarker, fails):
    cls, _ = benchmarker
    before, compiling, running = cls.__dict__["benchmark_gpu"], [], []

    def backend(graph, _inputs):
        compiling.append(cls.__dict__["benchmark_gpu"])

        def run(*args):
            running.append(cls.__dict__["benchmark_gpu"])
            if fails:
                raise RuntimeError("in the kernel")
            return graph(*args)

        return run

    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=backend)
    for _ in range(2):
        with torch.inference_mode():
            step.at_once(x)
    assert compiling[0] is before and hasattr(running[0], "_is_brief")
    assert fails or running[-1] is before  # the second run tunes nothing
    assert cls.__dict__["benchmark_gpu"] is before
