"""Which devices our measurements hold for."""

import pytest
import torch


@pytest.mark.parametrize(
    ("device", "hip", "nvidia"),
    [("cuda", None, True), ("cuda", "7.0.51831", False), ("xpu", None, False), ("mps", None, False), ("cpu", None, False)],
)
def test_amds_cards_are_called_cuda_as_well(engine, monkeypatch, device, hip, nvidia):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert engine("torch_settings").is_nvidia(torch.device(device)) is nvidia
