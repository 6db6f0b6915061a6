"""What reaches a block of `transformer_options`: the host's blocks, and those of other packs among them."""

import functools
import gc
import inspect
import types

import pytest
import sweep
import torch
import zoo
from patch_kinds import options
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

FIRST = {"sd15", "sdxl", "flux", "krea2", "wan21_t2v", "svd_img2vid"}
# Of the set-ups whose blocks others have, too, these bring classes of their own.
OWN_CLASSES = {"cascade_b", "pid", "stable_audio3", "wan_scail2", "z_image_pixel"}
READ = [name for name in zoo.SETUPS if name not in sweep.NEAR_DUPLICATES - OWN_CLASSES]


def compiled_in(engine, network):
    """The blocks that may be compiled, one of each class."""
    plan, parts_of = engine("blocks.discovery").find_blocks(network), engine("blocks.convolutions").parts_of
    blocks = [network.get_submodule(found.path) for found in plan.blocks]
    return list({type(m): m for block in blocks for m in (block, *parts_of(block))}.values())


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.rest) for n in READ])
def test_code_of_the_host_reads_by_literal_keys(engine, name):
    """A key is left out where no code names it: what this finds is all that the host's code reads."""
    options_filter = engine("transformer_options.filter")
    network = zoo.SETUPS[name].build().diffusion_model
    for block in compiled_in(engine, network):
        assert options_filter.keys_read(block) == ({"block_index"} if name.startswith("krea2") else set()), type(block)
    assert options_filter.keys_read(network) != options_filter.BOOKKEEPING, "it would have no CUDA graphs"
    del network
    gc.collect()


@pytest.fixture
def unet_block():
    from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer

    block = SpatialTransformer(32, 2, 16, context_dim=8, use_linear=True)
    assert isinstance(block.transformer_blocks[0], BasicTransformerBlock)
    return block


def given_to(engine, block, **more):
    given = {"sigmas": 1, "uuids": [2], "block": ("input", 3), "block_index": 3, "rope_options": {"scale": 2}, **more}
    filtered, _ = engine("transformer_options.filter").OptionsFilter(block)(given)
    return "all" if filtered is given else filtered


FEWER = {"rope_options": {"scale": 2}, "patches": {}, "patches_replace": {}}


def test_a_unets_block_gets_no_bookkeeping_and_all_else(engine, unet_block):
    assert given_to(engine, unet_block, patches={"attn1_patch": []}) == FEWER


def test_a_block_of_a_transformer_gets_none_either(engine, tiny):
    block = tiny.build_patcher("flux").model.diffusion_model.single_blocks[0]
    assert given_to(engine, block, patches={"attn1_patch": []}) == FEWER


def test_our_own_forwards_read_nothing_more(engine, unet_block):
    """A model that a trainer, or the host for another GPU, has copied has them in its blocks; CUDA graphs ask for its keys."""
    own_forward = engine("ownership").OwnForward
    for module in (unet_block, *unet_block.transformer_blocks):
        module.__dict__["forward"] = own_forward(type(module).forward, module)
    assert given_to(engine, unet_block) == FEWER


class Layer(torch.nn.Linear):
    """As ComfyUI-GGUF's: given tensors, whatever the arguments are called."""

    def forward(self, x, *args, **kwargs):
        return self.inner(x, *args, **kwargs)

    def inner(self, x, **kwargs):
        return super().forward(x, **kwargs)


class Adapter(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def forward(self, x, transformer_options=None):
        return x


def kernel(q, k, v, heads, *_args, mask=None, **_kwargs):
    """As KJNodes' attention: put in the place of the host's for all models."""
    return v


@pytest.mark.parametrize("kind", ["a layer", "a module without a use for options", "attention for all models"])
def test_code_of_packs_that_reads_no_options_changes_nothing(engine, unet_block, monkeypatch, kind):
    if kind == "a layer":
        unet_block.transformer_blocks[0].attn1.to_q = Layer(32, 32)
    elif kind == "attention for all models":
        monkeypatch.setattr("comfy.ldm.modules.attention.optimized_attention", kernel)
    else:
        unet_block.transformer_blocks[0].attn1 = Adapter()
    assert given_to(engine, unet_block) == FEWER


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Reading(torch.nn.Module):
    def forward(self, x, transformer_options=None, **kwargs):
        return x * transformer_options[list(transformer_options)[-1]]


def read_any(kwargs):
    return kwargs.popitem()


def kernel_that_hands_on(q, k, v, heads, **kwargs):
    return read_any(kwargs)


def wrapped_forward(module):
    @functools.wraps(module.forward)
    def forward(*given):
        return read_any(given[-1])

    module.forward = forward


def exchanged_class(block):
    class SpatialTransformer(type(block)):
        def forward(self, x, context=None, *rest):
            return read_any(rest[0])

    block.__class__ = SpatialTransformer


class Kernel:
    def __call__(self, q, k, v, heads, **kwargs):
        return read_any(kwargs)


def forward_of_no_function(block):
    class SpatialTransformer(type(block)):
        forward = functools.partialmethod(Kernel())

    block.__class__ = SpatialTransformer


KERNELS = {
    "attention for all models": kernel_that_hands_on,
    "a partial as attention": functools.partial(kernel_that_hands_on),
    "an object as attention": Kernel(),
}


@pytest.mark.parametrize(
    "kind", ["a module", "a module that hands on", "a forward", "a class", "a forward that is no function", *KERNELS]
)
def test_with_code_of_packs_that_may_read_options_all_is_given(engine, unet_block, monkeypatch, kind):
    inner = unet_block.transformer_blocks[0]
    if kind == "a module":
        inner.attn1 = Reading()
    elif kind == "a module that hands on":
        inner.attn1 = Wrapped(inner.attn1)
    elif kind == "a forward":
        wrapped_forward(inner)
    elif kind == "a class":
        exchanged_class(unet_block)
    elif kind == "a forward that is no function":
        forward_of_no_function(unet_block)
    else:
        monkeypatch.setattr("comfy.ldm.modules.attention.optimized_attention", KERNELS[kind])
    assert given_to(engine, unet_block) == "all"


def by_step(q, k, v, transformer_options):
    from comfy.ldm.cosmos.predict2 import torch_attention_op

    return torch_attention_op(q, k, v, transformer_options) * transformer_options["sigmas"]


class OfAPack:
    def __call__(self, *args, **kwargs):
        return by_step(*args, **kwargs)

    def by_place(self, *args, transformer_options):
        return by_step(*args, transformer_options) * transformer_options["block_index"]


def attention_ops():
    return [
        by_step,
        functools.partial(by_step),
        OfAPack(),
        OfAPack().by_place,
        lambda *args, **kwargs: by_step(*args, **kwargs),
    ]


@pytest.mark.parametrize(("mode", "which"), [*(("in background", which) for which in range(5)), ("before first image", 0)])
def test_a_function_among_the_attributes_of_a_layer_sees_all_that_it_reads(engine, mode, which):
    """The attention of the host's Cosmos, Predict2 and Anima is such an attribute."""
    setup = zoo.SETUPS["cosmos_predict2"]
    model, attention = setup.build(), attention_ops()[which]
    layers = [block.self_attn for block in model.diffusion_model.blocks]
    hosts = layers[0].attn_op
    compiler = engine("host.model.wrapper").BlockCompiler(
        model, engine("settings").CompileSettings(backend="eager", compile_when=mode)
    )

    def run(percent, *compiler):
        return sweep.call(model, setup.inputs(model=model, percent=percent), *compiler)

    for function in (hosts, attention, hosts, attention):
        for layer in layers:
            layer.attn_op = function
        for percent in (0.4, 0.4, 0.7):
            same(run(percent, compiler), run(percent), function)
            assert engine("background.thread").compiler.wait(120)
    assert not torch.equal(run(0.4), run(0.7))


@functools.cache
def own_copy():
    """The host's block in the file of another pack, as RES4LYF has it."""
    from comfy.ldm.modules import attention

    pack = types.ModuleType("pack_with_a_copy")
    vars(pack).update({name: value for name, value in vars(attention).items() if not name.startswith("__")})
    exec(inspect.getsource(attention.BasicTransformerBlock), vars(pack))  # noqa: S102
    return pack.BasicTransformerBlock


@pytest.mark.parametrize("mode", ["in background", pytest.param("before first image", marks=pytest.mark.rest)])
def test_a_packs_copy_of_a_unets_block_is_given_up_after_few_graphs(engine, tiny, mode):
    """It makes a key of its place for every call: a graph for each block."""
    unet = Runs(tiny, engine, "sdxl")
    blocks = [m for m in unet.patcher.model.diffusion_model.modules() if type(m).__name__ == "BasicTransformerBlock"]
    for block in blocks:
        block.__class__ = own_copy()
    expected, compiled = unet.plain(), unet.attach(unet.patcher, compile_when=mode)
    for _ in range(3):
        same(unet.run(compiled), expected)
        assert engine("background.thread").compiler.wait(120)
    (failure,) = unet.failures
    assert "traced 5 times for the same shapes: it reads what differs in each block or step" in failure
    assert len(blocks) == 11 and unet.graphs == 8, "five of one structure, and one for each of the three of the other"


def test_a_patch_in_a_packs_copy_is_applied(engine, tiny):
    unet = Runs(tiny, engine, "sdxl", only="middle_block.*")
    for block in unet.patcher.model.diffusion_model.modules():
        if type(block).__name__ == "BasicTransformerBlock":
            block.__class__ = own_copy()
    unet.check(options.one_image_prompt)
