"""ComfyUI's TrainLoraNode behind Torch Compile Model: trains as without it, and what was compiled stays."""

import pytest
import torch
from patching import Runs

pytestmark = [pytest.mark.host]


def train(patcher, runs, bypass):
    """Losses and the LoRA, of the host's node as the host runs it.

    Without checkpointing its Flux cannot be trained at all: blocks write into what a backward needs.
    """
    from comfy_extras.nodes_train import TrainLoraNode

    torch.manual_seed(7)
    latents = [{"samples": torch.randn(runs.latent.shape, generator=torch.Generator().manual_seed(n))} for n in range(2)]
    inputs = {
        "model": patcher, "batch_size": 1, "steps": 4, "grad_accumulation_steps": 1, "learning_rate": 1e-3, "rank": 4,
        "optimizer": "AdamW", "loss_function": "MSE", "seed": 3, "training_dtype": "fp32", "lora_dtype": "fp32",
        "quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": True, "checkpoint_depth": 1,
        "offloading": False, "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": bypass,
    }  # fmt: skip
    with torch.inference_mode():
        given = {name: [value] for name, value in inputs.items()}
        lora, losses, _steps = TrainLoraNode.execute(**given, latents=latents, positive=[runs.positive]).args
    return losses["loss"], lora


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("compile", ["at once", "in the background"])
def test_losses_and_lora_are_those_without_the_node(tiny, engine, model_files, bypass, compile):
    import comfy.sd

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.patcher = comfy.sd.load_diffusion_model(str(model_files["flux"]))
    expected, lora = train(runs.patcher, runs, bypass)
    compiled = runs.attach(runs.patcher, compile=compile)
    losses, ours = train(compiled, runs, bypass)
    assert losses == expected and len(set(losses)) > 1
    assert lora.keys() == ours.keys() and not any("_orig_mod" in key for key in ours)
    assert all(torch.equal(lora[key], ours[key]) for key in lora) and any(value.any() for value in ours.values())
    assert "Training: blocks run uncompiled while gradients are wanted." in engine("host.model.attach").notes_about(compiled)


def test_sampling_between_two_trainings_runs_compiled(tiny, engine, model_files):
    import comfy.sd

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.patcher = comfy.sd.load_diffusion_model(str(model_files["flux"]))
    compiled, results = runs.attach(runs.patcher), []
    for _ in range(2):
        results.append(train(compiled, runs, False)[0])
        with torch.inference_mode():
            assert torch.allclose(runs.run(compiled), runs.run(runs.patcher), atol=1e-6)
        assert runs.graphs == 2 and not runs.failures
    assert results[0] == results[1]
