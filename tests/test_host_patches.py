"""Patches of the host that act inside a model: compiled equals eager with each, without it, and with it added again."""

import functools

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

UNET_BLOCKS = [("input", 4), ("input", 5), ("middle", 0), ("output", 0), ("output", 1), ("output", 2)]


@pytest.fixture
def runs(tiny, engine):
    return lambda name, **options: Runs(tiny, engine, name, **options)


# What patches of other packs look like: plain functions, closures, objects, partial functions.


def scaled_inputs(q, k, v, extra_options):
    return q, k * 1.5, v * 0.7


def scaled_output(n, extra_options):
    return n * 1.5


def by_heads(n, extra_options):
    return n * extra_options["n_heads"] / extra_options.get("dim_head", 1)


def by_sigma(n, extra_options):
    return n * (1 + extra_options["sigmas"][0] / 10)


def by_place(n, extra_options):
    return n * (1.5 + extra_options["block_index"])


def by_everything(n, extra_options):
    options = dict(extra_options)
    return n * (1.5 + options["block_index"] + options["block"][1])


def scaled_by(n, extra_options, factor=1.0):
    return n * factor


def closure_over(factor):
    def patch(n, extra_options):
        return n * factor

    return patch


class ImagePrompt:
    """Attention to an image of its own for each block, as IPAdapter's objects do it."""

    def __init__(self, seed, weight):
        generator, self.weight = torch.Generator().manual_seed(seed), weight
        self.tokens = {width: torch.randn(1, 4, width, generator=generator) for width in (128, 256)}

    def __call__(self, q, k, v, extra_options):
        heads = extra_options["n_heads"]
        image = self.tokens[k.shape[-1]].expand(k.shape[0], -1, -1)
        return attention(q, k, v, heads) + self.weight * attention(q, image, image, heads)


class Counting(ImagePrompt):
    """Reads where it is and keeps a count, so that no two blocks or calls are the same to it."""

    def __call__(self, q, k, v, extra_options):
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(q, k, v, extra_options) * (1 + 0.01 * extra_options["block"][1])


def attention(q, k, v, heads):
    q, k, v = (t.view(t.shape[0], t.shape[1], heads, -1).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "how, patch",
    [
        ("attn1_patch", scaled_inputs),
        ("attn2_patch", scaled_inputs),
        ("attn1_output_patch", scaled_output),
        ("attn2_output_patch", by_heads),
        ("attn1_output_patch", by_sigma),
        ("attn2_output_patch", closure_over(1.7)),
    ],
)
def test_a_patch_of_a_unets_attention_costs_one_graph_per_kind(runs, how, patch):
    unet = runs("sdxl")
    assert unet.check(lambda m: getattr(m, f"set_model_{how}")(patch)) == 2
    assert not unet.failures


def test_a_patch_between_the_attentions(runs):
    unet = runs("sdxl")
    assert unet.check(lambda m: m.set_model_patch(lambda x, extra_options: x * 1.3, "middle_patch")) == 2


@pytest.mark.parametrize("patch", [by_place, by_everything, functools.partial(scaled_by, factor=1.6)])
def test_a_patch_that_reads_its_place_or_cannot_be_analysed_sees_it(runs, patch):
    unet = runs("sdxl")
    unet.check(lambda m: m.set_model_attn1_output_patch(patch))
    if unet.failures:
        assert "attn1_output_patch" in unet.failures[0] and "runs eager" in unet.failures[0]


@pytest.mark.parametrize("attn", ["attn1", "attn2"])
def test_objects_that_replace_attention_share_a_graph(runs, attn):
    unet = runs("sdxl")

    def image_prompt(m):
        for seed, place in enumerate(UNET_BLOCKS):
            getattr(m, f"set_model_{attn}_replace")(ImagePrompt(seed, torch.tensor(0.5 + seed)), *place)

    assert unet.check(image_prompt) == 2
    assert not unet.failures


def test_a_replacement_in_one_layer_of_one_block(runs):
    unet = runs("sdxl")
    unet.check(lambda m: m.set_model_attn1_replace(ImagePrompt(1, 2.0), "middle", 0, 1))
    assert not unet.failures


def test_a_patch_that_differs_every_time_runs_eager_and_is_named(runs, engine):
    unet = runs("sdxl", steps=4)

    def counting(m):
        for seed, place in enumerate(UNET_BLOCKS):
            m.set_model_attn2_replace(Counting(seed, 0.5), *place)

    unet.check(counting)
    assert unet.failures and all("attn2" in f and "Counting" in f and "runs eager" in f for f in unet.failures)
    report = engine("report")
    assert "Counting" in str(report.report_json())
    graphs = unet.graphs
    unet.check(lambda m: m.set_model_attn1_output_patch(scaled_output))
    assert unet.graphs == graphs + 2, "other patches are compiled as ever"


def test_a_patch_that_cannot_be_compiled_runs_eager_and_is_named(runs):
    flux = runs("flux", cfg=1.0)

    def untraceable(n, extra_options):
        return n * float(str(n.abs().mean().item())[:4])

    def add(m):
        m.set_model_attn1_output_patch(untraceable)

    expected = flux.run(_patched(flux.patcher, add))
    compiled = flux.attach(flux.patcher, fullgraph=True)
    plain = flux.run(compiled)
    same(flux.run(_patched(compiled, add)), expected)
    assert flux.failures and all("untraceable" in f for f in flux.failures)
    graphs = flux.graphs
    same(flux.run(compiled), plain)
    assert flux.graphs == graphs == 2


def _patched(patcher, how):
    clone = patcher.clone()
    how(clone)
    return clone


def flux_inputs(q, k, v, pe=None, attn_mask=None, extra_options=None):
    return {"q": q * 1.5, "k": k}


def wan_output(arguments):
    return arguments["x"] * 1.5


@pytest.mark.parametrize(
    "name, how, patch, kinds",
    [
        ("flux", "attn1_patch", flux_inputs, 2),
        ("flux", "attn1_output_patch", scaled_output, 2),
        ("qwen_image", "attn1_patch", flux_inputs, 1),
        ("wan", "attn1_patch", wan_output, 1),
        ("wan", "attn2_patch", wan_output, 1),
    ],
)
def test_a_patch_inside_the_blocks_of_a_transformer(runs, name, how, patch, kinds):
    dit = runs(name, cfg=1.0)
    assert dit.check(lambda m: m.set_model_patch(patch, how)) == kinds


@pytest.mark.parametrize("name, kind", [("flux", "double_block"), ("flux", "single_block"), ("wan", "double_block")])
def test_a_replacement_around_a_block_costs_nothing(runs, name, kind):
    dit = runs(name, cfg=1.0)

    def around(args, extra):
        out = extra["original_block"](args)
        return {key: value * 1.1 if isinstance(value, torch.Tensor) else value for key, value in out.items()}

    def skip(args, extra):
        return {key: args[key] for key in ("img", "txt") if key in args}

    assert dit.check(lambda m: m.set_model_patch_replace(around, "dit", kind, 1)) == 0
    assert dit.check(lambda m: m.set_model_patch_replace(skip, "dit", kind, 0)) == 0


def test_patches_between_the_blocks_cost_nothing(runs):
    unet, flux = runs("sdxl"), runs("flux", cfg=1.0)

    def output(h, hsp, options):
        return h * 1.2, hsp * options["block"][1]

    assert unet.check(lambda m: m.set_model_output_block_patch(output)) == 0
    assert unet.check(lambda m: m.set_model_input_block_patch(lambda h, options: h * 1.2)) == 0
    assert flux.check(lambda m: m.set_model_patch(lambda args: {**args, "img": args["img"] * 1.2}, "post_input")) == 0


def passed_on(func, *args, **kwargs):
    return func(*args, **kwargs) * 1.2


def by_place_of_attention(func, *args, **kwargs):
    return func(*args, **kwargs) * (1.2 + kwargs["transformer_options"].get("block_index", 0))


@pytest.mark.parametrize("override, most", [(passed_on, 2), (by_place_of_attention, 10)])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_an_attention_override(runs, name, override, most):
    model = runs(name, cfg=1.0)

    def overridden(m):
        m.model_options["transformer_options"]["optimized_attention_override"] = override

    assert 1 <= model.check(overridden) <= most


def test_a_hypernetwork(runs, tmp_path):
    from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch

    unet = runs("sdxl")
    generator = torch.Generator().manual_seed(1)

    def layer(width):
        weights = torch.randn(width, width, generator=generator) / 8, torch.zeros(width)
        return dict(zip(("linear.0.weight", "linear.0.bias"), weights, strict=True))

    # 64 is the width of the text, 128 and 256 those of the two levels with attention.
    torch.save({width: [layer(width), layer(width)] for width in (64, 128, 256)}, tmp_path / "hypernetwork.pt")
    loaded = load_hypernetwork_patch(str(tmp_path / "hypernetwork.pt"), 0.8)

    def hypernetwork(m):
        m.set_model_attn1_patch(loaded)
        m.set_model_attn2_patch(loaded)

    assert unet.check(hypernetwork) == 2
    assert not unet.failures


def test_core_hides_patches_from_the_guards_and_gets_it_wrong(runs):
    """What our way is measured against: a patch that is added later must be able to fail this comparison."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    flux = runs("flux", cfg=1.0)
    core = flux.patcher.clone()
    blocks = [f"diffusion_model.single_blocks.{i}" for i in range(4)]
    set_torch_compile_wrapper(core, "eager", options={"guard_filter_fn": skip_torch_compile_dict}, keys=blocks[:1])

    def only_single(m):
        m.set_model_attn1_output_patch(lambda n, extra_options: n * 1.5 if "block_type" in extra_options else n * 2)

    plain, expected = flux.run(flux.patcher), flux.run(_patched(flux.patcher, only_single))
    same(flux.run(core), plain)
    wrong = flux.run(_patched(core, only_single))
    assert not torch.allclose(wrong, expected, rtol=1e-3, atol=1e-4)
    ours = flux.attach(flux.patcher)
    same(flux.run(ours), plain)
    same(flux.run(_patched(ours, only_single)), expected)
