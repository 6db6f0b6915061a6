"""Whether CUDA graphs work with this PyTorch, found out in a process of its own; what that finds a GPU shows (test_gpu.py)."""

import re
import threading

import pytest
import torch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def probes(engine, tmp_path, monkeypatch):
    """probes(): a probe as in a new process, and how often one has tried; the cache is that of the test."""
    module, tries, ends = engine("cuda_graphs.probe"), [], threading.Event()
    cache = engine("cache.disk").DiskCache(tmp_path, 2**30)
    monkeypatch.setattr(module, "current", lambda: cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**40, 2**40))

    def made(answer=True):
        monkeypatch.setattr(module, "tried", lambda: (tries.append(1), ends.wait(10)) and answer)
        return module._Probe()

    made.tries, made.end = tries, ends.set
    yield made
    ends.set()


@pytest.mark.parametrize("answer", [True, False])
def test_it_is_tried_once_a_machine_while_nobody_waits(probes, answer):
    probe = probes(answer)
    assert probe.works(CUDA) is None
    probes.end()
    probe.thread.join(10)
    assert probe.works(CUDA) is answer and len(probes.tries) == 1
    assert probes(not answer).works(CUDA) is answer and len(probes.tries) == 1, "after a restart"


def test_what_the_machine_was_to_blame_for_is_not_kept(probes):
    probe = probes(None)
    probes.end()
    probe.works(CUDA)
    probe.thread.join(10)
    assert probe.works(CUDA) is False, "not in this process"
    again = probes(True)
    again.works(CUDA)
    again.thread.join(10)
    assert again.works(CUDA) is True and len(probes.tries) == 2


def test_not_beside_a_model_that_needs_the_memory(probes, monkeypatch):
    probe = probes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**30, 2**40))
        assert probe.works(CUDA) is None and probe.thread is None
    assert probe.works(CUDA) is None
    probes.end()
    probe.thread.join(10)
    assert probe.works(CUDA) is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs it to the end, see test_gpu.py")
def test_the_process_of_its_own_finds_the_code(engine, caplog):
    """Without a GPU it gets as far as asking for one; what cannot be done is no error."""
    with caplog.at_level("DEBUG", logger="torch-compile-kit"):
        assert engine("cuda_graphs.probe").tried() is False
    assert re.search(r"/engine/cuda_graphs/probe\.py\", line \d+, in main", caplog.text.replace("\\", "/"))
    last = caplog.text.strip().splitlines()[-1]
    assert re.match(r"(RuntimeError|AssertionError): .*(no NVIDIA driver|No CUDA GPUs|not compiled with CUDA)", last), last
