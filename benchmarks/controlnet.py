"""A model with a ControlNet, each compiled or not: seconds per step, latents against eager, what is captured.

python -m benchmarks.controlnet --host COMFYUI --model sdxl [--free 5 [--vram dynamic]]

With `--free` so many GiB of the GPU are left (the model is read from the file that `benchmarks.low_vram --make` makes), and the
host loads both partly, or streams them with dynamic VRAM.
"""

import argparse
import json
import os
from collections.abc import Iterator
from importlib import import_module

from . import low_vram, models, session, variants

STRENGTH = 0.8
RUNS = 3
# Options of the UNet that a ControlNet has not.
LEFT_OUT = ("out_channels", "transformer_depth_output", "use_temporal_resblock", "use_temporal_attention")


def build(name: str, device, load_device=None):
    """The host's ControlNet for the model, random weights on `device`."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops
    import torch

    model = models.MODELS[name]
    config = {key: value for key, value in model.config.items() if key not in LEFT_OUT}

    def network(device, operations):
        made = {"device": device, "dtype": model.dtype, "operations": operations}
        with torch.device(device):
            if name.startswith("flux"):  # the size of InstantX's union
                sizes = {**model.config, "depth": min(5, model.config["depth"]), "depth_single_blocks": 0}
                return comfy.ldm.flux.controlnet.ControlNetFlux(**sizes, **made)
            return comfy.cldm.cldm.ControlNet(hint_channels=3, **made, **config)

    # With dynamic VRAM the host's layers have no weights before they are loaded: as from a file.
    generator = torch.Generator(device=device).manual_seed(3)
    weights = {
        key: models.random_weight(key, parameter.shape, model.dtype, device, generator)
        for key, parameter in network(torch.device("meta"), torch.nn).named_parameters()
    }
    network = comfy.controlnet.controlnet_load_state_dict(network(device, comfy.ops.disable_weight_init), weights)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    extra = ["y", "guidance"] if name.startswith("flux") else ["y"]
    return comfy.controlnet.ControlNet(network.eval(), load_device=load_device or device, extra_conds=extra)


def compiled_whole(control):
    """As KJNodes' TorchCompileControlNet."""
    import torch

    found = control.copy()
    found.control_model = torch.compile(control.control_model)
    return found


def measure(options) -> Iterator[dict]:
    import torch

    name, device = options.model, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    ballast = []
    with torch.inference_mode():
        if options.free:
            import comfy.sd

            start = torch.cuda.mem_get_info()[0]
            patcher = comfy.sd.load_diffusion_model(str(low_vram.weights_file(name)))
            control = build(name, torch.device("cpu"), load_device=device)
            torch.cuda.empty_cache()
            ballast.append(torch.empty(int(start - options.free * low_vram.GIB), dtype=torch.uint8, device=device))
        else:
            patcher, control = models.build(name, device), build(name, device)
    width, height, _ = models.MODELS[name].size
    hint = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))
    plain = models.conditioning

    def controlled(control):
        def conditioning(*given):
            applied = control.copy().set_cond_hint(hint, STRENGTH, (0.0, 1.0))
            positive, negative = plain(*given)
            for _, entry in (*positive, *negative):
                entry.update(control=applied, control_apply_to_uncond=True)
            return positive, negative

        return conditioning

    def sample(model, conditioning):
        models.conditioning = conditioning
        result = session.sample(model, name, options.steps)
        models.conditioning = plain
        import_module(f"{session.KIT}.engine.background.thread").compiler.wait(200)
        return result

    settings = json.loads(options.settings)
    attach = import_module(f"{session.KIT}.engine.host.model.controlnet").attach_control
    chosen = import_module(f"{session.KIT}.engine.settings").CompileSettings(**settings)
    graphs_of = import_module(f"{session.KIT}.engine.cuda_graphs.capture").graphs_of
    without, _ = sample(patcher, plain)
    expected, eager = sample(patcher, controlled(control))
    ours = variants.apply("ours", patcher, session.KIT, **settings)
    memory = {"free_gib": options.free, "vram": options.vram} if options.free else {}
    common = {"kind": "controlnet_node", "model": name, **memory}
    changes = session.relative_error(expected, without)
    yield {**common, "variant": "eager", "step": session.median(eager[1:]), "changes_image": changes}
    ways = {
        "model alone": (ours, control),
        "both": (ours, attach(control, chosen)),
        "controlnet alone": (patcher, attach(control, chosen)),
        "controlnet whole": (patcher, compiled_whole(control)),
    }
    for variant in options.ways or ways:
        model, given = ways[variant]
        before, row = session.counts(), {"variant": variant}
        try:
            runs = [sample(model, controlled(given)) for _ in range(RUNS)]
            row |= {"first": runs[0][1][0], "step": session.median(runs[-1][1][1:])}
            row["errors"] = [session.relative_error(latent, expected) for latent, _ in runs]
            row |= {key: count - before[key] for key, count in session.counts().items()}
            row["captured"] = [graphs_of(n).captures for n in (patcher.model.diffusion_model, control.control_model)]
            row["replayed"] = [graphs_of(n).replays for n in (patcher.model.diffusion_model, control.control_model)]
        except Exception as error:
            row["died"] = f"{type(error).__name__}: {error}"[:300]
        yield {**common, **row}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="sdxl", choices=["sdxl", "sd15", "sdxl_small", "flux", "flux_small"])
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--free", type=float, help="GiB of the GPU that are left")
    parser.add_argument("--vram", choices=["dynamic", "legacy"], default="legacy")
    parser.add_argument("--ways", nargs="+", help="of: model alone, both, controlnet alone, controlnet whole")
    options = parser.parse_args()
    session.enter(options.host, dynamic_vram=options.vram == "dynamic")
    for row in measure(options):
        print("ROW", json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
