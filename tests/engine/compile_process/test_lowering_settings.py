"""Settings of PyTorch where a graph is traced hold where it is lowered."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from support import torch_settings


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "none": contextlib.nullcontext,
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("mode", MODES)
def test_they_go_over_and_what_is_for_one_graph_goes_back(engine, mode):
    settings, cpu = engine("compile_process.lowering_settings"), torch.device("cpu")
    before, found = torch_settings(), settings.now(cpu)
    with MODES[mode]():
        there = settings.now(cpu)
    assert (there == found) == (mode == "none")
    try:
        settings.set_for_process(json.loads(json.dumps(there)))
        with settings.for_graph(json.loads(json.dumps(there))):
            assert settings.now(cpu) == there
    finally:
        settings.set_for_process(found)
    assert settings.now(cpu) == found and torch_settings() == before


def test_cards_of_one_name_and_other_architectures_have_other_code(engine, monkeypatch):
    """AMD calls the GPUs of several of its processors "AMD Radeon Graphics"."""
    settings, card = engine("compile_process.lowering_settings"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "AMD Radeon Graphics")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (11, 0))
    found = []
    for name in ("gfx1103", "gfx1150"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, name=name: SimpleNamespace(gcnArchName=name))
        found.append(settings.now(card))
    assert found[0] != found[1]
