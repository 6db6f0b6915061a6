"""Which devices our measurements hold for."""

import types

import pytest
import torch


@pytest.mark.parametrize(
    ("device", "hip", "nvidia"),
    [("cuda", None, True), ("cuda", "7.0.51831", False), ("xpu", None, False), ("mps", None, False), ("cpu", None, False)],
)
def test_amds_cards_are_called_cuda_as_well(engine, monkeypatch, device, hip, nvidia):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert engine("torch_settings").is_nvidia(torch.device(device)) is nvidia


@pytest.mark.parametrize(
    ("contexts", "memory", "others"), [({0}, {0: 9}, []), ({0, 1}, {0: 9, 1: 0}, []), ({0, 1}, {0: 9, 1: 4}, ["cuda:1"])]
)
def test_gpus_that_are_in_use(engine, monkeypatch, contexts, memory, others):
    """One without a context is not asked for its memory: that would make one."""
    module = engine("devices")
    monkeypatch.setattr(module, "private", types.SimpleNamespace(has_primary_context=contexts.__contains__))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in (torch.device("cuda", 0), torch.device("cuda")):
        assert [str(other) for other in module.others_in_use(device)] == others
