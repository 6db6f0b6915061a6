"""What wraps a model's calls or divides its inputs; a `runs` is one of `patching.Runs`."""

import torch


def unpatched(m):
    """For what comes with the conditioning alone."""


def cached(node):
    """The host's EasyCacheNode or LazyCacheNode."""
    import comfy_extras.nodes_easycache as easycache

    return lambda m: getattr(easycache, node).execute(m, 5.0, 0.1, 0.95, False).result[0]


def windowed(m):
    import comfy_extras.nodes_context_windows as windows

    node = windows.WanContextWindowsManualNode
    return node.execute(m, 17, 8, "standard_static", 1, False, "pyramid", freenoise=False).result[0]


def with_options(conditioning, **options):
    return [[text, {**found, **options}] for text, found in conditioning]


def other_prompt(runs, tokens=24, seed=5):
    return runs.tiny.conditioning(runs.name, tokens=tokens, seed=seed)[0]


def in_an_area(runs):
    side = runs.latent.shape[-1] // 2
    area = (side, side, side // 2, side // 2)
    return runs.positive + with_options(other_prompt(runs), area=area, strength=1.0, set_area_to_bounds=False)


def _left_half():
    mask = torch.zeros(1, 64, 64)
    mask[:, :, :32] = 1.0
    return mask


def in_two_masks(runs):
    mask = _left_half()
    masked = with_options(other_prompt(runs), mask=mask, mask_strength=1.0, set_area_to_bounds=False)
    return with_options(runs.positive, mask=1 - mask, mask_strength=0.8, set_area_to_bounds=False) + masked


def in_bounds_of_a_mask(runs):
    return runs.positive + with_options(other_prompt(runs), mask=_left_half(), mask_strength=1.0, set_area_to_bounds=True)


def controlnet(tiny, name, seed):
    """A tiny ControlNet of the host's own classes, for SDXL and for Flux."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops

    made = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
    if name == "sdxl":
        left_out = ("out_channels", "transformer_depth_output", "use_temporal_resblock")
        config = {key: value for key, value in tiny.SDXL.items() if key not in left_out}
        model, conds = comfy.cldm.cldm.ControlNet(hint_channels=3, **config, **made), ["y"]
    else:
        config = {key: value for key, value in tiny.FLUX.items() if key != "image_model"}
        model, conds = comfy.ldm.flux.controlnet.ControlNetFlux(**config, **made), ["y", "guidance"]
    control = comfy.controlnet.ControlNet(tiny._randomise(model, seed), load_device=torch.device("cpu"), extra_conds=conds)
    return control.set_cond_hint(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed)), 0.9)


def controlled(runs):
    return with_options(runs.positive, control=controlnet(runs.tiny, runs.name, 1), control_apply_to_uncond=True)


def controlled_twice(runs):
    second = controlnet(runs.tiny, runs.name, 2)
    second.set_previous_controlnet(controlnet(runs.tiny, runs.name, 1))
    return with_options(runs.positive, control=second, control_apply_to_uncond=True)
