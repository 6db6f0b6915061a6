"""LoRA, merged models and exchanged modules: functions that take a clone of a patcher and patch it, or make one."""

import functools
import json

import torch

from .options import scaled_output


def lora_file(patcher, seed=1, rank=4, layers=("linear1", "img_attn.qkv", "txt_mlp.0")):
    """A LoRA for some layers of some blocks, as a trainer saves it."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in patcher.model.diffusion_model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.endswith(layers) and not layer.startswith("single_blocks.1"):
            found[f"diffusion_model.{layer}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) / 4
            found[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) / 4
    assert found
    return found


def lora(m):
    import comfy.sd

    return comfy.sd.load_lora_for_models(m, None, lora_file(m), 1.0, 0)[0]


def two_loras(m):
    import comfy.sd

    m, _ = comfy.sd.load_lora_for_models(m, None, lora_file(m), 0.8, 0)
    return comfy.sd.load_lora_for_models(m, None, lora_file(m, seed=2, layers=("linear2",)), 0.5, 0)[0]


def bypass_lora(m):
    import comfy.sd

    return comfy.sd.load_bypass_lora_for_models(m, None, lora_file(m), 1.0, 0)[0]


def load_partly(patcher, share):
    """The host loads `patcher` in part, as on a card that is too small (`lowvram`)."""
    import comfy.model_patcher

    class Partly(comfy.model_patcher.ModelPatcher):
        def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
            budget = max(1, int(self.model_size() * share))
            super().load(device_to, budget, force_patch_weights, full_load=False)

    patcher.__class__ = Partly


def scheduled_lora(runs, seed=1):
    """The conditioning of `runs` with a LoRA whose strength changes while sampling."""
    import comfy.hooks

    group = comfy.hooks.create_hook_lora(lora_file(runs.patcher, seed), 1.0, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    for strength, start in ((1.0, 0.0), (0.3, 0.5), (0.0, 0.8)):
        frames.add(comfy.hooks.HookKeyframe(strength, start))
    group.set_keyframes_on_hooks(frames)
    return comfy.hooks.set_hooks_for_conditioning(runs.positive, group)


def two_scheduled_loras(runs):
    return scheduled_lora(runs, 1) + scheduled_lora(runs, 2) + runs.positive


def hooked_patch(runs):
    """The conditioning of `runs` with a hook that brings a patch."""
    import comfy.hooks

    hook = comfy.hooks.TransformerOptionsHook(
        transformers_dict={"patches": {"attn1_output_patch": [scaled_output]}},
        hook_scope=comfy.hooks.EnumHookScope.HookedOnly,
    )
    group = comfy.hooks.HookGroup()
    group.add(hook)
    return comfy.hooks.set_hooks_for_conditioning(runs.positive, group)


def other_flux():
    from devtools import tiny_models as tiny

    other = tiny.build_patcher("flux")
    tiny._randomise(other.model.diffusion_model, seed=77)
    return other


def merged_with(other, ratio):
    import comfy_extras.nodes_model_merging as merging

    return lambda m: merging.ModelMergeSimple().merge(m, other, ratio)[0]


class Louder(torch.nn.Module):
    """Takes the place of a module: a block, or a layer in one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return louder(self.inner(*args, **kwargs))


class PlaceReader(Louder):
    """Depends on an entry that the host writes for its own use and that none of the model's own blocks reads."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * (1.0 + kwargs["transformer_options"].get("block_index", -1))


def louder(out):
    return tuple(o * 1.3 for o in out) if isinstance(out, tuple) else out * 1.3


def object_at(path, kind=Louder):
    def patch(m):
        key = f"diffusion_model.{path}"
        m.add_object_patch(key, kind(m.get_model_object(key)))

    return patch


def forward_at(path):
    def patch(m):
        key = f"diffusion_model.{path}.forward"
        original = m.get_model_object(key)
        m.add_object_patch(key, lambda *args, **kwargs: louder(original(*args, **kwargs)))

    return patch


@functools.cache
def louder_class(cls):
    class LouderInPlace(cls):
        def forward(self, *args, **kwargs):
            return louder(super().forward(*args, **kwargs))

    return LouderInPlace


def class_at(path):
    """Another class in place, as RES4LYF's nodes patch the models that they know."""

    def patch(m):
        cls = type(m.get_model_object(f"diffusion_model.{path}"))
        m.add_object_patch(f"diffusion_model.{path}.__class__", louder_class(cls))

    return patch


def place_reading_forward(path):
    def patch(m):
        key = f"diffusion_model.{path}.forward"
        original = m.get_model_object(key)

        def forward(*args, **kwargs):
            return original(*args, **kwargs) * (2.0 + kwargs["transformer_options"].get("block_index", -1))

        m.add_object_patch(key, forward)

    return patch


def quantised(state_dict, format_name, convrot=None):
    """The state dict as a quantised checkpoint has it (comfy/ops.py, `_load_quantized_module`).

    Args:
        convrot: of INT8, how many channels are rotated together.
    """
    import comfy.quant_ops as quant_ops

    layout, config, how = quant_ops.QUANT_ALGOS[format_name]["comfy_tensor_layout"], {"format": format_name}, {}
    if convrot is not None:
        rotation = {"convrot": True, "convrot_groupsize": convrot}
        config, how = {**config, **rotation}, {"per_channel": True, **rotation}
    marker = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
    result = {}
    for key, weight in state_dict.items():
        if key.endswith(".weight") and weight.dim() == 2 and "blocks" in key:
            tensor = quant_ops.QuantizedTensor.from_float(weight.bfloat16(), layout, **how)
            result |= tensor.state_dict(key)
            result[key.removesuffix("weight") + "comfy_quant"] = marker
        else:
            result[key] = weight.bfloat16()
    return result
