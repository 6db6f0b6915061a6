"""Quantised models: no graph breaks, and the host's results, emulated and with native matrix products (on the CPU: the
host's own fallback behind the same code)."""

import itertools

import pytest
import torch
from paging import paged
from patch_kinds.weights import load_partly, lora, lora_file, quantised
from patching import Runs
from support import relative_error, wait_until_compiled

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


FORMATS = "float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4", "convrot_w4a4", "asym_w4a8_int8"
# Each format once; int8 is computed in the same way either way.
FIRST = {("float8_e4m3fn", True), ("int8_tensorwise", False), ("mxfp8", False), ("nvfp4", True), ("convrot_w4a4", False)}


def loaded(state_dict, native, monkeypatch, **options):
    import comfy.model_management
    import comfy.sd

    with monkeypatch.context() as patch:
        for name in ("supports_fp8_compute", "supports_nvfp4_compute", "supports_mxfp8_compute"):
            patch.setattr(comfy.model_management, name, lambda *_: native)
        return comfy.sd.load_diffusion_model_state_dict(state_dict, model_options=options)


@pytest.mark.parametrize(
    ("format_name", "native"),
    [
        pair if pair in FIRST else pytest.param(*pair, marks=pytest.mark.rest)
        for pair in itertools.product(FORMATS, (False, True))
    ],
)
def test_no_breaks_and_the_hosts_result(format_name, native, tiny, engine, monkeypatch):
    import comfy.ops
    import comfy.quant_ops

    if format_name not in comfy.quant_ops.QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {format_name}")
    runs = Runs(tiny, engine, "flux", cfg=1.0, only="single_blocks.*")
    runs.patcher = loaded(quantised(runs.patcher.model.diffusion_model.state_dict(), format_name), native, monkeypatch)
    layer = runs.patcher.model.diffusion_model.single_blocks[0].linear1
    assert type(layer.weight).__name__ == "QuantizedTensor"
    before = comfy.ops.cast_bias_weight
    try:
        expected = runs.run(runs.patcher)
    except ValueError as error:
        if native and "CPU does not support swizzle" in str(error):
            pytest.skip("PyTorch 2.15 has no native mxfp8 and nvfp4 products on a CPU: ComfyUI itself cannot run them there")
        raise
    assert relative_error(runs.run(runs.attach(runs.patcher, fullgraph=True)), expected) < 1e-3
    assert runs.graphs == 1 and not runs.failures
    assert sum(group.stats.graph_breaks for group in runs.groups) == 0
    assert comfy.ops.cast_bias_weight is before


def test_another_packs_cast_stays_and_gets_the_hosts(tiny, engine, monkeypatch):
    """It is put there while a model samples, around the one of ours that it found."""
    import comfy.ops

    runs = Runs(tiny, engine, "flux", cfg=1.0, only="single_blocks.*")
    runs.patcher = loaded(quantised(runs.patcher.model.diffusion_model.state_dict(), "float8_e4m3fn"), True, monkeypatch)
    expected, hosts, casts = runs.run(runs.patcher), comfy.ops.cast_bias_weight, []
    compiled = runs.attach(runs.patcher)

    def wrap_it(*_):
        found = comfy.ops.cast_bias_weight
        assert found is not hosts

        def theirs(s, input=None, dtype=None, device=None, **kwargs):
            if not torch.compiler.is_compiling():
                casts.append(input)
            return found(s, input, dtype, device, **kwargs)

        monkeypatch.setattr(comfy.ops, "cast_bias_weight", theirs)
        hook.remove()

    hook = runs.patcher.model.diffusion_model.img_in.register_forward_pre_hook(wrap_it)
    for _ in range(2):
        assert relative_error(runs.run(compiled), expected) < 1e-3
        assert comfy.ops.cast_bias_weight not in (hosts, engine("host.weights.traceable_layers").cast_bias_weight)
    layer, seen = runs.patcher.model.diffusion_model.single_blocks[0].linear1, []
    with monkeypatch.context() as patch:
        patch.setattr(engine("host.weights.traceable_layers"), "_host_cast", lambda s, input, *_, **__: seen.append(input))
        comfy.ops.cast_bias_weight(layer, layer.weight)
    assert seen == [layer.weight], "as if ours were not there"


def lora_patches(patcher):
    """By layer, what the host applies to its weight at each cast."""
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_patcher

    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    patches = {}
    for key, adapter in comfy.lora.load_lora(comfy.lora_convert.convert_lora(lora_file(patcher)), keys).items():
        patch = comfy.model_patcher.LowVramPatch(key, {key: [(1.0, adapter, 1.0, None, None)]})
        patch._pin_state = {}
        patches[patcher.model.get_submodule(key.removesuffix(".weight"))] = patch
    return patches


@pytest.mark.parametrize(
    ("format_name", "native", "rounded"),
    [
        ("float8_e4m3fn", False, False),
        ("float8_e4m3fn", True, True),
        ("int8_tensorwise", False, True),
        ("convrot_w4a4", False, True),
    ],
)
def test_lora_on_paged_layers_is_rounded_as_the_host_does(format_name, native, rounded, tiny, engine, monkeypatch):
    """For products in the weight's format, which not every GPU has.

    On a CPU the host's paged layers leave LoRA out: the image to compare with is that of other layers, which round nothing.
    """
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.patcher = loaded(quantised(runs.patcher.model.diffusion_model.state_dict(), format_name), native, monkeypatch)
    patches = lora_patches(runs.patcher)

    def apply(*_):  # the host has loaded the model by now
        for layer, patch in patches.items():
            layer.weight_function = [patch]

    hook = runs.patcher.model.diffusion_model.register_forward_pre_hook(apply)
    expected = runs.run(runs.patcher)
    hook.remove()
    with paged(monkeypatch, runs.patcher.model):
        for layer, patch in patches.items():
            layer.weight_lowvram_function = patch
        compiled = runs.attach(runs.patcher, compile_when="in background")
        for _ in range(2):
            assert (relative_error(runs.run(compiled), expected) > 1e-3) == rounded
            wait_until_compiled(engine)
    assert not runs.failures


@pytest.mark.parametrize("assigned", [False, True])
def test_fp8_fast_computes_as_the_host_does_where_weights_are_paged(assigned, tiny, engine, monkeypatch):
    """In fp8, but where the loader assigns a bf16 file's tensors, as under dynamic VRAM: there only the pages are in fp8."""
    import comfy.memory_management
    import comfy.model_patcher

    runs = Runs(tiny, engine, "flux", cfg=1.0, only="single_blocks.*")
    weights = runs.patcher.model.diffusion_model.state_dict()
    state_dict = {name: tensor.to(torch.float8_e4m3fn).bfloat16() for name, tensor in weights.items()}
    images = []
    for fast in (False, True):
        with monkeypatch.context() as patch:
            if assigned:
                patch.setattr(comfy.memory_management, "aimdo_enabled", True)
                patch.setattr(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: True)
            runs.patcher = loaded(dict(state_dict), True, monkeypatch, dtype=torch.float8_e4m3fn, fp8_optimizations=fast)
        for layer in runs.patcher.model.diffusion_model.modules() if assigned else ():
            for key in ("weight", "bias"):  # as ModelPatcherDynamic has it after loading
                if hasattr(layer, "comfy_cast_weights") and (tensor := getattr(layer, key, None)) is not None:
                    tensor._model_dtype = getattr(layer, f"{key}_comfy_model_dtype", None) or tensor.dtype
        with paged(monkeypatch, runs.patcher.model) as pages:
            pages.resident = set(pages.layers)
            images.append(runs.run(runs.patcher))
            compiled = runs.attach(runs.patcher, compile_when="in background")
            for _ in range(2):
                assert relative_error(runs.run(compiled), images[-1]) < 1e-4
                wait_until_compiled(engine)
        assert not runs.failures
    assert (relative_error(*images) > 1e-2) is not assigned


def test_layers_with_lora_in_low_memory_compute_as_the_hosts_do(tiny, engine, monkeypatch):
    """In full precision, though the GPU has products in the weight's format."""
    runs = Runs(tiny, engine, "flux", cfg=1.0, only="single_blocks.*")
    runs.patcher = loaded(quantised(runs.patcher.model.diffusion_model.state_dict(), "float8_e4m3fn"), True, monkeypatch)
    load_partly(runs.patcher, 0.0)
    patched = lora(runs.patcher)
    expected = runs.run(patched)
    compiled = runs.attach(patched, compile_when="in background")
    for _ in range(2):
        assert relative_error(runs.run(compiled), expected) < 1e-4
        wait_until_compiled(engine)
    assert not runs.failures
