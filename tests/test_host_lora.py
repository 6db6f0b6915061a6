"""LoRA in every way the host applies it, merged models, object patches and hooks on modules, over and under our node."""

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def flux(tiny, engine):
    return Runs(tiny, engine, "flux", cfg=1.0)


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


def test_merged_into_the_weights(flux):
    import comfy.sd

    first, second = lora_file(flux.patcher), lora_file(flux.patcher, seed=2, layers=("linear2",))

    def stacked(m):
        m, _ = comfy.sd.load_lora_for_models(m, None, first, 0.8, 0)
        return comfy.sd.load_lora_for_models(m, None, second, 0.5, 0)[0]

    assert flux.check(lambda m: comfy.sd.load_lora_for_models(m, None, first, 1.0, 0)[0]) == 0
    assert flux.check(stacked) == 0


@pytest.fixture
def partly_loaded():
    """partly_loaded(patcher, share): the host loads it in part, as on a card that is too small (`lowvram`)."""
    import comfy.model_patcher

    def limit(patcher, share):
        class Partly(comfy.model_patcher.ModelPatcher):
            def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
                budget = max(1, int(self.model_size() * share))
                super().load(device_to, budget, force_patch_weights, full_load=False)

        patcher.__class__ = Partly
        return patcher

    return limit


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_applied_at_each_cast_in_low_memory(flux, partly_loaded, share):
    import comfy.model_patcher
    import comfy.sd

    lora, seen = lora_file(flux.patcher), []
    partly_loaded(flux.patcher, share)
    flux.patcher.model.diffusion_model.single_blocks[0].register_forward_pre_hook(
        lambda block, _: seen.extend(block.linear1.weight_function)
    )
    added = flux.check(lambda m: comfy.sd.load_lora_for_models(m, None, lora, 1.0, 0)[0])
    if share == 0.0:
        assert any(isinstance(f, comfy.model_patcher.LowVramPatch) for f in seen)
    assert added <= 2, flux.failures
    assert not flux.failures


def test_bypass_runs_beside_the_weights(flux):
    import comfy.sd

    lora = lora_file(flux.patcher)
    added = flux.check(lambda m: comfy.sd.load_bypass_lora_for_models(m, None, lora, 1.0, 0)[0])
    assert added <= 8, added
    assert not flux.failures


def test_hooks_with_a_schedule(flux):
    import comfy.hooks

    lora = lora_file(flux.patcher)
    flux.steps = 4

    def hooked(seed):
        group = comfy.hooks.create_hook_lora(lora_file(flux.patcher, seed), 1.0, 0.0)
        frames = comfy.hooks.HookKeyframeGroup()
        for strength, start in ((1.0, 0.0), (0.3, 0.5), (0.0, 0.8)):
            frames.add(comfy.hooks.HookKeyframe(strength, start))
        group.set_keyframes_on_hooks(frames)
        return comfy.hooks.set_hooks_for_conditioning(flux.positive, group)

    assert lora
    assert flux.check(lambda m: None, positive=hooked(1)) == 0
    both = hooked(1) + hooked(2) + flux.positive
    assert flux.check(lambda m: None, positive=both) <= 2


def test_hooks_that_bring_patches_and_objects(flux):
    import comfy.hooks

    def brighter(n, extra_options):
        return n * 1.5

    hook = comfy.hooks.TransformerOptionsHook(
        transformers_dict={"patches": {"attn1_output_patch": [brighter]}}, hook_scope=comfy.hooks.EnumHookScope.HookedOnly
    )
    group = comfy.hooks.HookGroup()
    group.add(hook)
    positive = comfy.hooks.set_hooks_for_conditioning(flux.positive, group)
    assert flux.check(lambda m: None, positive=positive) == 2


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_merged_models(flux, tiny, ratio):
    import comfy_extras.nodes_model_merging as merging

    other = tiny.build_patcher("flux")
    tiny._randomise(other.model.diffusion_model, seed=77)
    assert flux.check(lambda m: merging.ModelMergeSimple().merge(m, other, ratio)[0]) == 0
    compiled_other = flux.attach(other)
    merged = merging.ModelMergeSimple().merge(flux.attach(flux.patcher), compiled_other, ratio)[0]
    same(flux.run(merged), flux.run(merging.ModelMergeSimple().merge(flux.patcher, other, ratio)[0]))


class Louder(torch.nn.Module):
    """Takes the place of a module: a block, or a layer in one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return tuple(o * 1.3 for o in out) if isinstance(out, tuple) else out * 1.3


class PlaceReader(Louder):
    """Depends on an entry that the host writes for its own use and that none of the model's own blocks reads."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * (1.0 + kwargs["transformer_options"].get("block_index", -1))


@pytest.mark.parametrize("path", ["double_blocks.0", "single_blocks.2", "single_blocks.2.linear1", "double_blocks.1.img_mlp"])
def test_object_patches_of_blocks_and_layers(flux, path):
    def louder(m):
        key = f"diffusion_model.{path}"
        m.add_object_patch(key, Louder(m.get_model_object(key)))

    assert flux.check(louder) <= 2


@pytest.mark.parametrize("path", ["single_blocks.2", "single_blocks.2.linear1", "double_blocks.1.img_mlp", "double_blocks.1"])
def test_object_patches_of_a_forward(flux, path):
    def louder(m):
        key = f"diffusion_model.{path}.forward"
        original = m.get_model_object(key)

        def forward(*args, **kwargs):
            out = original(*args, **kwargs)
            return tuple(o * 1.3 for o in out) if isinstance(out, tuple) else out * 1.3

        m.add_object_patch(key, forward)

    assert flux.check(louder) <= 4


def test_an_object_in_a_block_that_reads_what_blocks_do_not(tiny, engine):
    """KJNodes puts a cross-attention of its own into Wan's blocks; such code may read any entry of the options."""
    wan = Runs(tiny, engine, "wan", cfg=1.0)

    def reading(m):
        key = "diffusion_model.blocks.1.self_attn"
        m.add_object_patch(key, PlaceReader(m.get_model_object(key)))

    def reading_forward(m):
        key = "diffusion_model.blocks.2.self_attn.forward"
        original = m.get_model_object(key)

        def forward(*args, **kwargs):
            return original(*args, **kwargs) * (2.0 + kwargs["transformer_options"].get("block_index", -1))

        m.add_object_patch(key, forward)

    wan.check(reading)
    wan.check(reading_forward)
    hook = wan.patcher.model.diffusion_model.blocks[3].self_attn.register_forward_hook(
        lambda _m, _a, kwargs, out: out * (2.0 + kwargs["transformer_options"].get("block_index", -1)), with_kwargs=True
    )
    compiled = wan.run(wan.attach(wan.patcher))
    expected = wan.run(wan.patcher)
    hook.remove()
    same(compiled, expected)
    same(wan.run(wan.attach(wan.patcher)), wan.run(wan.patcher))


@pytest.mark.parametrize("path", ["double_blocks.0", "single_blocks.2.linear1"])
def test_forward_hooks(flux, path):
    module = flux.patcher.model.diffusion_model.get_submodule(path)

    def louder(_module, _args, out):
        return tuple(o * 1.3 for o in out) if isinstance(out, tuple) else out * 1.3

    compiled = flux.attach(flux.patcher)
    plain = flux.run(compiled)
    for _ in range(2):
        hook = module.register_forward_hook(louder)
        with_hook = flux.run(compiled)
        expected = flux.run(flux.patcher)
        hook.remove()
        assert not torch.allclose(expected, plain, rtol=1e-3)
        same(with_hook, expected)
        same(flux.run(compiled), plain)
