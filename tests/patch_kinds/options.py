"""Patches that the host keeps in `transformer_options`, as other packs write them: functions, closures, objects, partials."""

import tempfile
from pathlib import Path

import torch

UNET_BLOCKS = [("input", 4), ("input", 5), ("middle", 0), ("output", 0), ("output", 1), ("output", 2)]


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


def untraceable(n, extra_options):
    return n * float(str(n.abs().mean().item())[:4])


class Relabelled:
    """Is another one in each call."""

    label = ""

    def __call__(self, n, extra_options):
        self.label += "."
        return n * 1.5


def flux_inputs(q, k, v, pe=None, attn_mask=None, extra_options=None):
    return {"q": q * 1.5, "k": k}


def wan_output(arguments):
    return arguments["x"] * 1.5


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


# What puts them into a clone of a patcher.


def patched_with(patch, how):
    """A patch in the list that the host keeps for `how`."""
    return lambda m: m.set_model_patch(patch, how)


def image_prompts(attn, kind=ImagePrompt):
    def patch(m):
        for seed, place in enumerate(UNET_BLOCKS):
            getattr(m, f"set_model_{attn}_replace")(kind(seed, torch.tensor(0.5 + seed)), *place)

    return patch


def one_image_prompt(m):
    m.set_model_attn1_replace(ImagePrompt(1, 2.0), "middle", 0, 1)


def image_prompts_by_layer(m):
    for layer in (0, 1):
        m.set_model_attn2_replace(ImagePrompt(layer, 0.5 + layer), "middle", 0, layer)


def around(args, extra):
    out = extra["original_block"](args)
    return {key: value * 1.1 if isinstance(value, torch.Tensor) else value for key, value in out.items()}


def skip(args, extra):
    return {key: args[key] for key in ("img", "txt") if key in args}


def block_replaced(replacement, kind, number):
    return lambda m: m.set_model_patch_replace(replacement, "dit", kind, number)


def output_block(m):
    m.set_model_output_block_patch(lambda h, hsp, options: (h * 1.2, hsp * options["block"][1]))


def input_block(m):
    m.set_model_input_block_patch(lambda h, options: h * 1.2)


def post_input(m):
    m.set_model_patch(lambda args: {**args, "img": args["img"] * 1.2}, "post_input")


def passed_on(func, *args, **kwargs):
    return func(*args, **kwargs) * 1.2


def by_place_of_attention(func, *args, **kwargs):
    return func(*args, **kwargs) * (1.2 + kwargs["transformer_options"].get("block_index", 0))


class Sparse:
    """Attention that keeps state by block and step, as a sparse attention of newer hosts; `calls` says what it was told."""

    def __init__(self):
        self.pooled, self.calls = {}, []

    def __call__(self, func, *args, **kwargs):
        options = kwargs["transformer_options"]
        sigma, block = float(options["sigmas"][0]), options["block_index"]
        self.calls.append((sigma, block))
        before = self.pooled.get(block, sigma)
        self.pooled[block] = sigma
        out = func(*args, **kwargs)
        return out if block == 0 else out * (1.0 + 0.1 * before)


def overridden(override):
    def patch(m):
        m.model_options["transformer_options"]["optimized_attention_override"] = override

    return patch


def hypernetwork():
    from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch

    generator = torch.Generator().manual_seed(1)

    def layer(width):
        weights = torch.randn(width, width, generator=generator) / 8, torch.zeros(width)
        return dict(zip(("linear.0.weight", "linear.0.bias"), weights, strict=True))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hypernetwork.pt"
        # 64 is the width of the text, 128 and 256 those of the two levels with attention.
        torch.save({width: [layer(width), layer(width)] for width in (64, 128, 256)}, file)
        loaded = load_hypernetwork_patch(str(file), 0.8)

    def patch(m):
        m.set_model_attn1_patch(loaded)
        m.set_model_attn2_patch(loaded)

    return patch
