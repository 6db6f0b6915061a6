"""Patches of the host that act inside a model: compiled equals eager with each, without it, and with it added again."""

import functools
import types

import pytest
import torch
import zoo
from patch_kinds import options
from patching import Runs, patched, same
from patching import shares_code as fresh_dynamo  # noqa: F401
from sampling import sample
from support import wait_until_compiled

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def runs(tiny, engine):
    return lambda name, **chosen: Runs(tiny, engine, name, **chosen)


FIRST = [
    ("attn1_output_patch", options.by_sigma),
    ("attn2_output_patch", options.closure_over(1.7)),
]
OTHERS = [
    ("attn1_patch", options.scaled_inputs),
    ("middle_patch", options.scaled_output),
    ("attn2_patch", options.scaled_inputs),
    ("attn1_output_patch", options.scaled_output),
    ("attn2_output_patch", options.by_heads),
]


@pytest.mark.parametrize("patches", [FIRST, pytest.param(OTHERS, marks=pytest.mark.rest)], ids=["first", "others"])
def test_a_patch_of_a_unets_attention_cuts_a_block_in_two(runs, patches):
    unet = runs("sdxl", only="middle_block.*")
    for how, patch in patches:
        assert unet.check(options.patched_with(patch, how)) == 2, (how, patch)
        assert not unet.failures


@pytest.mark.parametrize(
    "patch",
    [
        options.by_place,
        options.untraceable,
        pytest.param(options.by_everything, marks=pytest.mark.rest),
        pytest.param(functools.partial(options.scaled_by, factor=1.6), marks=pytest.mark.rest),
    ],
)
def test_a_patch_may_read_all(runs, patch):
    unet = runs("sdxl", only="middle_block.*")
    assert unet.check(options.patched_with(patch, "attn1_output_patch")) == 2
    assert not unet.failures


def test_patches_that_are_made_anew_share_their_graphs(runs):
    """As nodes make closures in each prompt, one for each strength."""
    flux = runs("flux", cfg=1.0, only="single_blocks.*")
    counts = [flux.check(options.patched_with(options.closure_over(1.5 + n), "attn1_output_patch")) for n in range(3)]
    assert counts == [2, 0, 0]


@pytest.mark.parametrize("name, graphs", [("flux", 6), ("sdxl", 6)])
def test_patches_of_several_kinds(runs, name, graphs):
    """A loop over two of them, and one behind it."""

    def patch(m):
        for _ in range(2):
            m.set_model_attn1_patch(options.flux_inputs if name == "flux" else options.scaled_inputs)
        m.set_model_attn1_output_patch(options.scaled_output)

    model = runs(name, cfg=1.0)
    assert model.check(patch) == graphs and not model.failures


def test_an_error_of_a_patch_is_the_prompts(runs):
    flux, calls = runs("flux", cfg=1.0, only="double_blocks.*"), []

    def fails(n, extra_options):
        calls.append(extra_options["block_index"])
        raise ZeroDivisionError("of the patch")

    with pytest.raises(ZeroDivisionError, match="of the patch"):
        flux.run(patched(flux.attach(flux.patcher), options.patched_with(fails, "attn1_output_patch")))
    assert calls == [0] and not flux.failures
    flux.check(options.patched_with(options.scaled_output, "attn1_output_patch"))


def test_what_a_patch_writes_is_there_for_the_next(runs):
    """In the copy of the options that Flux makes for the patches of a block, and in an object of the host's dict."""
    flux, seen = runs("flux", cfg=1.0, steps=1, only="double_blocks.*"), []

    def writes(q, k, v, pe=None, attn_mask=None, extra_options=None):
        extra_options["left"] = extra_options["block_index"]
        extra_options["kept"].append(1)
        return {"q": q}

    def reads(n, extra_options):
        seen.append((extra_options["left"], len(extra_options["kept"])))
        return n * (1 + extra_options["left"])

    def run(patcher):
        clone = patcher.clone()
        clone.set_model_patch(writes, "attn1_patch")
        clone.set_model_attn1_output_patch(reads)
        clone.model_options["transformer_options"]["kept"] = []
        seen.clear()
        return flux.run(clone), [*seen]

    expected, told = run(flux.patcher)
    compiled = flux.attach(flux.patcher)
    for _ in range(2):
        image, again = run(compiled)
        same(image, expected)
        assert again == told and told[0] == (0, 1)


@pytest.mark.parametrize("mode", ["in background", "before first image"])
def test_after_another_nodes_compiling_the_blocks_are_compiled(runs, engine, mode):
    """KJNodes' nodes for models, in the prompt before: the host takes their patches off when it loads the model again."""
    flux = runs("flux", cfg=1.0)
    others, expected = flux.patcher.clone(), flux.plain()
    for path in [f"double_blocks.{i}" for i in range(2)] + [f"single_blocks.{i}" for i in range(4)]:
        block = flux.patcher.model.diffusion_model.get_submodule(path)
        others.add_object_patch(f"diffusion_model.{path}", torch.compile(block, backend="eager"))
    flux.run(others)
    compiled = flux.attach(flux.patcher, compile_when=mode)
    for _ in range(2):
        same(flux.run(compiled), expected, mode)
        wait_until_compiled(engine)
    assert flux.graphs == 2 and not flux.failures


def test_blocks_inside_what_another_node_compiles(engine):
    """KJNodes' node for HunyuanVideo wraps `txt_in`, which holds two blocks: they are compiled in the prompt after it, and left
    to it in a prompt with both, where it would compile its module anew in each step."""
    setup, compiled_by_it = zoo.SETUPS["hunyuan_video"], []
    patcher = setup.patcher(setup.build())
    others, network = patcher.clone(), patcher.model.diffusion_model
    backend = lambda graph, _inputs: compiled_by_it.append(graph) or graph  # noqa: E731
    others.add_object_patch("diffusion_model.txt_in", torch.compile(network.txt_in, backend=backend))
    settings = engine("settings").CompileSettings(backend="eager", compile_when="in background")
    run = lambda patcher: sample(patcher, setup.conds(), setup.latent(), 1.0, 1, 4)  # noqa: E731
    expected = run(others)
    alone = len(compiled_by_it)
    for chosen in (patcher, others):
        compiled = engine("host.model.attach").attach(chosen, settings)
        for _ in range(2):
            same(run(compiled), expected)
            wait_until_compiled(engine)
        groups = {group.class_name for group in engine("compile.registry").code_of(network).groups.values()}
        assert "DoubleStreamBlock" in groups and "TokenRefinerBlock" in groups, "compiled after the other node"
    assert len(compiled_by_it) == alone, "compiled anew beside this pack"


def test_another_method_than_forward_put_on_a_layer_and_taken_off(own_code, runs, engine):
    """PyTorch does not look at a module's own methods again. The host leaves the class's method where the patch was."""
    sd3 = runs("sd3", steps=2)

    def patched(factor):
        patcher = sd3.patcher.clone()
        for i, block in enumerate(patcher.model.diffusion_model.joint_blocks):

            def quieter(self, *args, **kwargs):
                (q, k, v), rest = type(self).pre_attention(self, *args, **kwargs)
                return (q, k, v * factor), rest

            patcher.add_object_patch(
                f"diffusion_model.joint_blocks.{i}.x_block.pre_attention", types.MethodType(quieter, block.x_block)
            )
        return patcher

    patchers = [sd3.patcher, patched(0.3), patched(0.6)]
    expected = [sd3.run(patcher) for patcher in patchers]
    assert not any(torch.allclose(expected[0], other, rtol=1e-3) for other in expected[1:])
    for which in (0, 1, 2, 0, 1):
        compiled = sd3.attach(patchers[which], compile_when="in background", only_blocks="joint_blocks.0")
        for _ in range(2):
            same(sd3.run(compiled), expected[which], which)
            wait_until_compiled(engine)
    assert not sd3.failures and sd3.graphs == 3, "three methods"


class OfAPack:
    def __init__(self, block, factor):
        self.block, self.factor = block, factor

    def pre_attention(self, *args, **kwargs):
        (q, k, v), rest = type(self.block).pre_attention(self.block, *args, **kwargs)
        return (q, k, v * self.factor), rest


def quieter_by(block, factor, how):
    """A method made anew, as packs do in each prompt that replace methods by hand."""

    before = types.MethodType(type(block).pre_attention, block)

    def quieter(self, *args, **kwargs):
        (q, k, v), rest = type(self).pre_attention(self, *args, **kwargs)
        return (q, k, v * factor), rest

    def with_default(self, *args, by=factor, options={}, **kwargs):  # noqa: B006
        (q, k, v), rest = type(self).pre_attention(self, *args, **kwargs)
        return (q, k, v * by), rest

    def handing_on(self, *args, **kwargs):
        return quieter(self, *args, **kwargs)

    if how == "a method of an object":
        return OfAPack(block, factor).pre_attention

    def around(self, *args, **kwargs):
        (q, k, v), rest = before(*args, **kwargs)
        return (q, k, v * factor), rest

    function = {
        "a closure": quieter,
        "a default value": with_default,
        "a closure over a closure": handing_on,
        "around": around,
    }[how]
    return types.MethodType(function, block)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        *((how, "in background") for how in ("a default value", "a closure over a closure", "a method of an object", "around")),
        *(("a closure", mode) for mode in ("in background", "before first image")),
    ],
)
def test_a_method_made_anew_for_each_prompt(own_code, runs, engine, mode, how):
    sd3 = runs("sd3", steps=2)
    network = sd3.patcher.model.diffusion_model

    def patched(factor):
        patcher = sd3.patcher.clone()
        for i, block in enumerate(network.joint_blocks):
            patcher.add_object_patch(
                f"diffusion_model.joint_blocks.{i}.x_block.pre_attention", quieter_by(block.x_block, factor, how)
            )
        return patcher

    graphs = []
    for factor in (0.3, 0.3, 0.6, 0.3):
        patcher = patched(factor)
        expected = sd3.run(patcher)
        compiled = sd3.attach(patcher, compile_when=mode, only_blocks="joint_blocks.0")
        for _ in range(2):
            same(sd3.run(compiled), expected, factor)
            wait_until_compiled(engine)
        graphs.append(sd3.graphs)
    assert not sd3.failures
    assert graphs == [1, 1, 2, 2], "what is made anew of the same code and values is the same"


@pytest.mark.parametrize(
    ("name", "mode"), [("sdxl", "in background"), ("flux", "in background"), ("flux", "before first image")]
)
def test_a_patch_whose_strength_is_a_default_value(own_code, runs, engine, name, mode):
    """PyTorch before 2.15 guards no default values unless it is told to: each image had the first strength."""
    model = runs(name, cfg=1.0)

    def scaled(patcher, strength):
        patcher = patcher.clone()
        if name == "sdxl":
            patcher.set_model_attn1_output_patch(lambda out, extra_options, strength=strength: out * strength)
        else:
            patcher.set_model_patch(
                lambda q, k, v, pe=None, attn_mask=None, extra_options=None, strength=strength: {
                    "q": q * strength, "k": k, "v": v, "pe": pe, "attn_mask": attn_mask
                },
                "attn1_patch",
            )  # fmt: skip
        return patcher

    blocks = {"sdxl": "middle_block.*", "flux": "single_blocks.*"}[name]
    compiled = model.attach(model.patcher, compile_when=mode, only_blocks=blocks)
    for strength in (0.5, 1.5, 0.8):
        expected = model.run(scaled(model.patcher, strength))
        model.run(scaled(compiled, strength))
        wait_until_compiled(engine)
        same(model.run(scaled(compiled, strength)), expected, f"strength {strength}")


@pytest.mark.parametrize("attn", [pytest.param("attn1", marks=pytest.mark.rest), "attn2"])
def test_objects_that_replace_attention_share_a_graph(runs, attn):
    unet = runs("sdxl", only="middle_block.*")
    assert unet.check(options.image_prompts(attn)) == 2
    assert unet.check(options.image_prompts(attn, options.Counting)) == 0
    assert not unet.failures


def test_replacements_in_all_layers_of_a_block_share_a_graph(runs):
    """As nodes for image prompts make them: SDXL's ten layers of a block were traced ten times."""
    unet = runs("sdxl", only="middle_block.*")
    assert unet.check(options.image_prompts_by_layer) == 2 and not unet.failures


@pytest.mark.rest
def test_a_replacement_in_one_layer_of_one_block(runs):
    unet = runs("sdxl", only="middle_block.*")
    unet.check(options.one_image_prompt)
    assert not unet.failures


def test_a_patch_that_differs_every_time(runs):
    flux = runs("flux", cfg=1.0, steps=4, only="single_blocks.*")
    assert flux.check(lambda m: m.set_model_attn1_output_patch(options.Relabelled())) == 2 and not flux.failures
    assert flux.check(options.patched_with(options.flux_inputs, "attn1_patch")) == 2, "they are cut at another place"


@pytest.mark.parametrize("on_failure", ["run uncompiled", "stop"])
def test_with_fullgraph_a_patched_block_runs_eager_and_the_patch_is_named(runs, engine, on_failure):
    flux = runs("flux", cfg=1.0)

    def add(m):
        m.set_model_attn1_output_patch(options.untraceable)

    expected = flux.run(patched(flux.patcher, add))
    compiled = flux.attach(flux.patcher, fullgraph=True, on_failure=on_failure)
    plain = flux.run(compiled)
    if on_failure == "stop":
        with pytest.raises(engine("errors").BlockCompileError, match=r"untraceable.* Set fullgraph to false"):
            flux.run(patched(compiled, add))
    else:
        same(flux.run(patched(compiled, add)), expected)
    assert flux.failures and all("untraceable" in f and "Set fullgraph to false" in f for f in flux.failures)
    same(flux.run(compiled), plain)
    assert flux.graphs == 2 and not flux.failures


@pytest.mark.parametrize(
    "name, how, patch, kinds",
    [
        ("flux", "attn1_patch", options.flux_inputs, 4),
        pytest.param("flux", "attn1_output_patch", options.scaled_output, 4, marks=pytest.mark.rest),
        pytest.param("qwen_image", "attn1_patch", options.flux_inputs, 4, marks=pytest.mark.rest),
        pytest.param("wan", "attn1_patch", options.wan_output, 4, marks=pytest.mark.rest),
        ("wan", "attn2_patch", options.wan_output, 2),
    ],
)
def test_a_patch_inside_the_blocks_of_a_transformer(runs, name, how, patch, kinds):
    dit = runs(name, cfg=1.0)
    assert dit.check(options.patched_with(patch, how)) == kinds


@pytest.mark.parametrize(
    "name, kind",
    [
        ("flux", "double_block"),
        pytest.param("flux", "single_block", marks=pytest.mark.rest),
        pytest.param("wan", "double_block", marks=pytest.mark.rest),
    ],
)
def test_a_replacement_around_a_block_costs_nothing(runs, name, kind):
    dit = runs(name, cfg=1.0)
    assert dit.check(options.block_replaced(options.around, kind, 1)) == 0
    assert dit.check(options.block_replaced(options.skip, kind, 0)) == 0


def test_patches_between_the_blocks_cost_nothing(runs):
    unet, flux = runs("sdxl"), runs("flux", cfg=1.0)
    assert unet.check(options.output_block) == 0
    assert unet.check(options.input_block) == 0
    assert flux.check(options.post_input) == 0


@pytest.mark.parametrize(
    "name, override, most",
    [
        ("flux", options.passed_on, 6),
        pytest.param("flux", options.by_place_of_attention, 6, marks=pytest.mark.rest),
        pytest.param("sdxl", options.passed_on, 14, marks=pytest.mark.rest),
        pytest.param("sdxl", options.by_place_of_attention, 14, marks=pytest.mark.rest),
    ],
)
def test_an_attention_override(runs, name, override, most):
    only = {"flux": "double_blocks.*", "sdxl": "middle_block.*"}[name]
    model = runs(name, cfg=1.0 if name == "flux" else 4.0, only=only)
    assert 1 <= model.check(options.overridden(override)) <= most
    assert not model.failures


@pytest.mark.parametrize("mode", ["in background", "before first image"])
@pytest.mark.parametrize("name, graphs", [("flux", 6), pytest.param("wan", 7, marks=pytest.mark.rest)])
def test_an_override_that_keeps_state_by_block_and_step_is_called_outside_of_the_graphs(runs, engine, name, graphs, mode):
    model = runs(name, cfg=1.0, steps=5)

    def run(patcher):
        override = options.Sparse()
        return model.run(patched(patcher, options.overridden(override))), override.calls

    expected, calls = run(model.patcher)
    assert not torch.allclose(expected, model.plain(), rtol=1e-3, atol=1e-4)
    compiled = model.attach(model.patcher, compile_when=mode)
    model.run(compiled)
    assert engine("background.thread").compiler.wait(120)
    before = model.graphs
    for _ in range(3):
        image, seen = run(compiled)
        same(image, expected, "with the override")
        assert seen == calls, "each call is told what the host tells it, once"
        assert engine("background.thread").compiler.wait(120)
    assert model.graphs - before == graphs and not model.failures
    same(model.run(compiled), model.plain(), "without the override")


@pytest.mark.rest
def test_a_hypernetwork(runs):
    unet = runs("sdxl", only="middle_block.*")
    assert unet.check(options.hypernetwork()) == 3
    assert not unet.failures


def test_a_block_that_cannot_be_looked_at_runs_eager_and_is_named(runs, engine):
    def fails(*_args, **_kwargs):
        raise RuntimeError("not like this")

    flux = runs("flux", cfg=1.0)
    flux.patcher.model.diffusion_model.single_blocks[1].named_buffers = fails
    compiled = flux.attach(flux.patcher)
    same(flux.run(compiled), flux.plain())
    assert any(
        "could not look at it (RuntimeError: not like this)" in n for n in engine("host.model.attach").notes_about(compiled)
    )
