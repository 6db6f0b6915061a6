"""Compiled code really runs: for each format of the weights, with each kind of attention, made in the background or at once.

Each row samples a prompt, waits until nothing is left to compile, and samples another one. In the second prompt each call of
each block must run compiled code, nothing may be compiled any more, and the image must be eager's. Runs are counted where
PyTorch's backend hands code out, not taken from the engine's statistics.
"""

import functools
import itertools
import unittest.mock

import pytest
import torch
from compiled_runs import CompiledRuns
from patch_kinds import options, weights
from patch_kinds.packed import pack
from patching import Runs
from support import lower_here, relative_error, wait_until_compiled

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

BACKGROUND, AT_ONCE = MODES = "in background", "before first image"
PYTORCH, UNTRACEABLE = "PyTorch attention", "untraceable attention"
# By model: the class of the blocks that are compiled, and how only these are; Flux' double ones have the same layers.
BLOCKS = {
    "flux": ("SingleStreamBlock", "single_blocks.*"),
    "wan": ("WanAttentionBlock", ""),
    "sdxl": ("BasicTransformerBlock", ""),
}


@pytest.fixture
def counted():
    with CompiledRuns().installed() as runs:
        yield runs


@pytest.fixture
def check(engine, counted):
    """check(runs, patcher, mode, expected, pieces): see the module's docstring.

    Args:
        pieces: graphs of a block that use its weights: two around an operation that cannot be traced.
        patched: likewise, of blocks with a patch: others have one.
    """

    def check(runs, patcher, mode, expected, pieces=1, patched=1):
        class_name, only = BLOCKS[runs.name]
        lower_here(engine, "eager")
        settings = engine("settings").CompileSettings(backend="eager", compile_when=mode, only_blocks=only)
        compiled = engine("host.model.attach").attach(patcher, settings)
        assert relative_error(runs.run(compiled), expected) < 1e-5, "while code is made"
        wait_until_compiled(engine)
        graphs = counted.graphs
        counted.clear()
        assert relative_error(runs.run(compiled), expected) < 1e-5, "once it is made"
        by_block = counted.by_block(patcher.model.diffusion_model, [class_name])
        assert by_block, "no blocks"
        wanted = {pieces * runs.steps, patched * pieces * runs.steps}
        assert set(by_block.values()) <= wanted, f"{by_block}, {counted.graphs - graphs} graphs more"
        wait_until_compiled(engine)
        assert counted.graphs == graphs, "compiled in the second prompt or after it"

    return check


# Formats of the weights. Each takes the state dict of a model and returns a patcher.


def loaded(state_dict, **chosen):
    import comfy.sd

    return comfy.sd.load_diffusion_model_state_dict(dict(state_dict), model_options=chosen)


def unquantised(dtype):
    """As the host's loader has it with this `weight_dtype` chosen for a checkpoint in bf16."""
    return lambda state_dict: loaded({name: tensor.bfloat16() for name, tensor in state_dict.items()}, dtype=dtype)


def quantised_as(format_name, **how):
    def load(state_dict):
        import comfy.quant_ops

        if format_name not in comfy.quant_ops.QUANT_ALGOS:
            pytest.skip(f"this ComfyUI has no {format_name}")
        return loaded(weights.quantised(state_dict, format_name, **how))

    return load


def native(load):
    """Products in the format itself, as on GPUs that have them; on a CPU the host's kernels fall back to others inside."""

    def load_native(state_dict):
        import comfy.model_management as management

        names = "supports_fp8_compute", "supports_nvfp4_compute", "supports_mxfp8_compute"
        with unittest.mock.patch.multiple(management, **dict.fromkeys(names, lambda *_: True)):
            return load(state_dict)

    return load_native


def packed(state_dict):
    patcher = loaded(state_dict)
    pack(patcher)
    return patcher


FORMATS = {
    "bf16": unquantised(torch.bfloat16),
    "fp8": unquantised(torch.float8_e4m3fn),
    "scaled fp8": quantised_as("float8_e4m3fn"),
    "int8": quantised_as("int8_tensorwise"),
    "int8 with ConvRot": quantised_as("int8_tensorwise", convrot=256),
    "w4a4 with ConvRot": quantised_as("convrot_w4a4"),
    "asymmetric w4a8": quantised_as("asym_w4a8_int8"),
    "mxfp8": quantised_as("mxfp8"),
    "nvfp4": quantised_as("nvfp4"),
    "packed as GGUF": packed,
    "scaled fp8, native": native(quantised_as("float8_e4m3fn")),
    "mxfp8, native": native(quantised_as("mxfp8")),
    "nvfp4, native": native(quantised_as("nvfp4")),
}
# On the CPU these take seconds, and a page of warnings for each product.
SLOW = "mxfp8, native", "nvfp4, native"
# A weight as it is, a tensor of a class of its own, a layer that unpacks: with each attention and mode. All formats at once,
# with how many graphs: weights/test_quantized.py.
KINDS = {"bf16", "int8", "packed as GGUF"}
USUAL = (PYTORCH, BACKGROUND)


def rows():
    for format_name, attention, mode in itertools.product(FORMATS, (PYTORCH, UNTRACEABLE), MODES):
        is_usual = (attention, mode) == USUAL
        if not is_usual and format_name not in KINDS:
            continue
        in_rest = format_name in SLOW if is_usual else format_name != "bf16" or (attention, mode) == (UNTRACEABLE, AT_ONCE)
        marks = [pytest.mark.rest] if in_rest else []
        yield pytest.param(format_name, attention, mode, marks=marks, id=f"{format_name}-{attention}-{mode}")


@torch._dynamo.disable
def kernel(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_like_sage(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, **kwargs):
    """What the host puts in the place of PyTorch's attention with `--use-sage-attention`."""
    assert skip_reshape
    return kernel(q, k, v, mask).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def state_dict(tiny):
    return tiny.build_patcher("flux").model.diffusion_model.state_dict()


@pytest.fixture(scope="module")
def eager_images():
    """By format and attention."""
    return {}


@pytest.mark.parametrize(("format_name", "attention", "mode"), list(rows()))
def test_each_call_of_a_block_runs_compiled_code(
    format_name, attention, mode, tiny, engine, state_dict, eager_images, check, monkeypatch
):
    import comfy.ldm.flux.math
    from comfy.ldm.modules.attention import wrap_attn

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.patcher = FORMATS[format_name](state_dict)
    if attention == UNTRACEABLE:
        monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", wrap_attn(attention_like_sage))
    if (format_name, attention) not in eager_images:
        try:
            eager_images[format_name, attention] = runs.run(runs.patcher)
        except ValueError as error:
            if "CPU does not support swizzle" in str(error):
                pytest.skip(f"PyTorch {torch.__version__} cannot multiply {format_name} on a CPU, neither does ComfyUI then")
            raise
    check(runs, runs.patcher, mode, eager_images[format_name, attention], 2 if attention == UNTRACEABLE else 1)
    assert {group.code.why_inline for group in runs.groups} == {None}, "lowered in ComfyUI's process"


def test_formats_are_what_they_are_called(state_dict):
    """None of them is another one under a new name."""
    kinds = {}
    for name in FORMATS:
        if not name.endswith("native"):
            layer = FORMATS[name](state_dict).model.diffusion_model.single_blocks[0].linear1
            saved = layer.state_dict()
            marker = saved.get("comfy_quant")
            kinds[name] = type(layer.weight).__name__, saved["weight"].dtype, marker is not None and bytes(marker.tolist())
    assert len(set(kinds.values())) == len(kinds), kinds


# What holds only during a call, or is known only by what it closes over.


def layers_that_close_over_their_forward(patcher):
    """The usual way of wrapping a layer."""

    def louder(original):
        return lambda *args, **kwargs: original(*args, **kwargs) * 2.0

    for number in range(4):
        key = f"diffusion_model.blocks.{number}.self_attn.forward"
        patcher.add_object_patch(key, louder(patcher.get_model_object(key)))


def scaled_norm(module, q, k, v):
    q, k = type(module).forward(module, q, k, v)
    return q * 3.0, k


def layers_with_a_partial_forward(patcher):
    for block in patcher.model.diffusion_model.single_blocks:
        block.norm.forward = functools.partial(scaled_norm, block.norm)


def inside(context):
    """The diffusion model runs in a context that another node has wrapped around it."""

    def patch(patcher):
        def wrapper(executor, *args, **kwargs):
            with context():
                return executor(*args, **kwargs)

        patcher.add_wrapper("diffusion_model", wrapper)

    return patch


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def no_inference_mode():
    return torch.inference_mode(False)


def other_attention():
    """A function of the host's that another node replaces while the model runs."""
    import comfy.ldm.flux.layers as layers

    original = layers.attention

    def scaled(q, *args, **kwargs):
        return original(q * 1.1, *args, **kwargs)

    return unittest.mock.patch.object(layers, "attention", scaled)


PATCHES = {
    "LoRA in bypass mode": ("flux", weights.bypass_lora),
    "layers that close over their forward": ("wan", layers_that_close_over_their_forward),
    "layers with a partial as forward": ("flux", layers_with_a_partial_forward),
    "a layer whose new forward reads its place": ("wan", weights.place_reading_forward("blocks.2.self_attn")),
    "autocast inside": ("flux", inside(autocast)),
    "no inference mode inside": ("flux", inside(no_inference_mode)),
    "a function exchanged inside": ("flux", inside(other_attention)),
    "image prompts": ("sdxl", options.image_prompts("attn2")),
}


@pytest.mark.parametrize(("model", "patch"), PATCHES.values(), ids=PATCHES)
def test_each_call_of_a_patched_block_runs_compiled_code(model, patch, tiny, engine, check):
    """In the background; at once other tests have them, in more ways."""
    runs = Runs(tiny, engine, model, cfg=1.0)
    clone = runs.patcher.clone()
    patched = patch(clone) or clone
    # What is called between two graphs: a patch inside of some blocks, and an object.
    outside = patch in (PATCHES["image prompts"][1], PATCHES["layers with a partial as forward"][1])
    check(runs, patched, BACKGROUND, runs.run(patched), patched=2 if outside else 1)


@pytest.mark.parametrize("mode", [BACKGROUND, pytest.param(AT_ONCE, marks=pytest.mark.rest)])
def test_a_block_that_stays_eager_is_named_with_the_reason(mode, tiny, engine, counted):
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    with runs.hooked("single_blocks.1.linear1", lambda _module, _args, out: out * 1.3):
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher, compile_when=mode)
        for _ in range(2):
            counted.clear()
            assert relative_error(runs.run(compiled), expected) < 1e-5
            wait_until_compiled(engine)
        by_block = counted.by_block(runs.patcher.model.diffusion_model, ["DoubleStreamBlock", "SingleStreamBlock"])
        assert [path for path, count in by_block.items() if count < runs.steps] == ["single_blocks.1"]
        (message,) = runs.failures
        assert "SingleStreamBlock" in message and "hook" in message
        assert message in str(engine("messages.report").report_json())
