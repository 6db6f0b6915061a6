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


# By index of the GPU: the most bytes that tensors took there; None: it has failed.
@pytest.mark.parametrize(
    ("contexts", "memory", "others"),
    [({0}, {0: 9}, []), ({0, 1}, {0: 9, 1: 0}, []), ({0, 1}, {0: 9, 1: 4}, ["cuda:1"]), ({0, 1}, {0: 9, 1: None}, ["cuda:1"])],
)
def test_gpus_that_are_in_use(engine, monkeypatch, contexts, memory, others):
    """One without a context is not asked for its memory: that would make one."""

    def stats(index):
        if memory[index] is None:
            raise RuntimeError("CUDA error: unknown error")
        return {"allocated_bytes": {"all": {"peak": memory[index]}}}

    module = engine("devices")
    monkeypatch.setattr(module, "_used", set())
    monkeypatch.setattr(module, "private", types.SimpleNamespace(has_primary_context=contexts.__contains__))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in (torch.device("cuda", 0), torch.device("cuda")):
        assert [str(other) for other in module.others_in_use(device)] == others
    memory[1] = 0  # what was there is gone, and the peak was reset
    assert [str(other) for other in module.others_in_use(device)] == others
