"""A UNet with a ControlNet of its own size in CUDA graphs: latents against eager, what is captured, and seconds per step.

python -m benchmarks.controlnet --host COMFYUI --model sdxl
"""

import argparse
import json
import os
from importlib import import_module

from . import models, session, variants

STRENGTH = 0.8
# Options of the UNet that a ControlNet has not.
LEFT_OUT = ("out_channels", "transformer_depth_output", "use_temporal_resblock", "use_temporal_attention")


def build(name: str, device):
    """The host's ControlNet for the model, random weights."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops
    import torch

    model = models.MODELS[name]
    config = {key: value for key, value in model.config.items() if key not in LEFT_OUT}
    made = {"device": device, "dtype": model.dtype, "operations": comfy.ops.disable_weight_init}
    with torch.device(device):
        network = comfy.cldm.cldm.ControlNet(hint_channels=3, **made, **config)
    generator = torch.Generator(device=device).manual_seed(3)
    for key, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = models.random_weight(key, parameter.shape, model.dtype, device, generator)
    return comfy.controlnet.ControlNet(network.eval(), load_device=device)


def measure(options) -> dict:
    import torch

    name, device = options.model, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        patcher, control = models.build(name, device), build(name, device)
    width, height, _ = models.MODELS[name].size
    hint = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))
    plain = models.conditioning

    def controlled(*given):
        applied = control.copy().set_cond_hint(hint, STRENGTH, (0.0, 1.0))
        positive, negative = plain(*given)
        for _, entry in (*positive, *negative):
            entry.update(control=applied, control_apply_to_uncond=True)
        return positive, negative

    def sample(model, conditioning):
        models.conditioning = conditioning
        return session.sample(model, name, options.steps)

    without, _ = sample(patcher, plain)
    expected, eager = sample(patcher, controlled)
    ours = variants.apply("ours", patcher, session.KIT, **json.loads(options.settings))
    runs = [sample(ours, conditioning) for conditioning in (controlled, controlled, plain, controlled)]
    graphs = import_module(f"{session.KIT}.engine.cuda_graphs.capture").graphs_of(patcher.model.diffusion_model)
    return {
        "kind": "controlnet",
        "model": name,
        "settings": json.loads(options.settings),
        "changes_image": session.relative_error(expected, without),
        "errors": [session.relative_error(latent, expected) for latent, _ in (runs[0], runs[1], runs[3])],
        "without": session.relative_error(runs[2][0], without),
        "captured": graphs.captures,
        "replayed": graphs.replays,
        "failures": list(graphs.failures.values()),
        "graphs": session.counts(),
        "eager": round(session.median(eager[1:]), 5),
        "first": round(runs[0][1][0], 5),
        "step": round(session.median(runs[1][1][1:]), 5),
        "step_again": round(session.median(runs[3][1][1:]), 5),
        "notes": import_module(f"{session.KIT}.engine.host.model.attach").notes_about(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="sdxl", choices=["sdxl", "sd15", "sdxl_small"])
    parser.add_argument("--settings", default='{"mode": "reduce-overhead"}')
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    session.enter(options.host)
    print("ROW", json.dumps(measure(options)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
