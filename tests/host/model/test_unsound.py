"""The comparisons of the tests of patches can fail: each kind of patch goes wrong where compiled code is less careful.

Each kind goes through the very comparison that ours passes (`Runs.check`), on a model that is compiled in an unsound way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch._dynamo
from patch_kinds import conditions, options, weights
from patching import Differs, Runs, same

pytestmark = [pytest.mark.host, pytest.mark.rest, pytest.mark.usefixtures("inference_mode")]


# The unsound ways. Each takes a patcher and gives a clone with the whole model compiled.


def without_guards_on_options(patcher):
    """As core's TorchCompileModel node does: whatever is in `transformer_options` is hidden from the guards."""
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    return compiled_by_core(patcher, skip_torch_compile_dict)


def without_guards(patcher):
    """Nothing is guarded: as it was at the first call, the model stays. A CUDA graph that is replayed unasked does that."""
    return compiled_by_core(patcher, lambda entries: [False] * len(entries), dynamic=False)


def with_frozen_weights(patcher):
    """The weights of the first call become constants of the graph, as inductor's `freezing` does it."""
    return compiled_by_core(patcher, None, backend=_freezing)


def _freezing(graph, _inputs):
    frozen = {}

    def run(*args):
        for i, arg in enumerate(args):
            if isinstance(arg, torch.nn.Parameter) and i not in frozen:
                frozen[i] = arg.clone()
        return graph(*(frozen.get(i, arg) for i, arg in enumerate(args)))

    return run


def compiled_by_core(patcher, guard_filter, backend="eager", dynamic=None):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = patcher.clone()
    chosen = {"guard_filter_fn": guard_filter} if guard_filter else None
    set_torch_compile_wrapper(clone, backend, options=chosen, dynamic=dynamic)
    return clone


class Unsound(Runs):
    """A model that `way` compiles.

    Args:
        way: takes a patcher; gives a clone of it, compiled.
        share: how much of it the host loads, if in part.
        chosen: as for `Runs`.
    """

    def __init__(self, way, tiny, engine, name, share=None, **chosen):
        super().__init__(tiny, engine, name, **chosen)
        self.attach = way
        if share is not None:
            weights.load_partly(self.patcher, share)

    @property
    def graphs(self):
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@dataclass(frozen=True)
class PatchKind:
    """A kind of patch: on which model, what it does to a patcher or the conditioning it comes with, and how it goes wrong."""

    model: str
    patch: Callable = conditions.unpatched
    positive: Callable | None = None
    chosen: dict = field(default_factory=lambda: {"cfg": 1.0})
    steps: int = 2
    error: type[Exception] = Differs

    def inputs(self, runs):
        return {"positive": self.positive(runs)} if self.positive else {}


MESSAGES = {Differs: "with the patch:", RuntimeError: "shape|size", KeyError: None}
TWO_PASSES = {"cfg": 3.0}
put = options.patched_with
# A graph that is made for another shape cannot but raise.
other_shape = partial(PatchKind, chosen=TWO_PASSES, error=RuntimeError)


def longer_prompt(name):
    return other_shape(name, positive=partial(conditions.other_prompt, tokens=60))


IN_OPTIONS = {
    "attn1_patch": PatchKind("sdxl", put(options.scaled_inputs, "attn1_patch")),
    "attn2_patch": PatchKind("sdxl", put(options.scaled_inputs, "attn2_patch")),
    "attn1_output_patch": PatchKind("sdxl", put(options.scaled_output, "attn1_output_patch")),
    "attn2_output_patch": PatchKind("sdxl", put(options.by_heads, "attn2_output_patch")),
    "middle_patch": PatchKind("sdxl", put(options.scaled_output, "middle_patch")),
    "a patch that reads the step": PatchKind("sdxl", put(options.by_sigma, "attn1_output_patch")),
    "a patch that reads its place": PatchKind("sdxl", put(options.by_place, "attn1_output_patch")),
    "a patch that reads everything": PatchKind("sdxl", put(options.by_everything, "attn1_output_patch")),
    "a patch that is a closure": PatchKind("sdxl", put(options.closure_over(1.7), "attn2_output_patch")),
    "a patch that is a partial": PatchKind("sdxl", put(partial(options.scaled_by, factor=1.6), "attn1_output_patch")),
    "attn1 replaced (IPAdapter)": PatchKind("sdxl", options.image_prompts("attn1")),
    "attn2 replaced (IPAdapter)": PatchKind("sdxl", options.image_prompts("attn2")),
    "attn2 replaced by what counts": PatchKind("sdxl", options.image_prompts("attn2", options.Counting)),
    "attn1 replaced in one layer": PatchKind("sdxl", options.one_image_prompt),
    "hypernetwork": PatchKind("sdxl", lambda m: options.hypernetwork()(m)),
    "output_block_patch": PatchKind("sdxl", options.output_block),
    "input_block_patch": PatchKind("sdxl", options.input_block),
    "attention override in a UNet": PatchKind("sdxl", options.overridden(options.passed_on)),
    "attention override in a UNet, by place": PatchKind("sdxl", options.overridden(options.by_place_of_attention)),
    "EasyCache on a UNet": PatchKind("sdxl", conditions.cached("EasyCacheNode"), steps=6),
    "attn1_patch in Flux": PatchKind("flux", put(options.flux_inputs, "attn1_patch")),
    "attn1_output_patch in Flux": PatchKind("flux", put(options.scaled_output, "attn1_output_patch")),
    "a patch that cannot be compiled": PatchKind("flux", put(options.untraceable, "attn1_output_patch")),
    "a patch that a hook brings": PatchKind("flux", positive=weights.hooked_patch),
    "double_block wrapped": PatchKind("flux", options.block_replaced(options.around, "double_block", 1)),
    "double_block skipped": PatchKind("flux", options.block_replaced(options.skip, "double_block", 0)),
    "single_block wrapped": PatchKind("flux", options.block_replaced(options.around, "single_block", 1)),
    "single_block skipped": PatchKind("flux", options.block_replaced(options.skip, "single_block", 0)),
    "post_input": PatchKind("flux", options.post_input),
    "attention override in Flux": PatchKind("flux", options.overridden(options.passed_on)),
    "attention override in Flux, by place": PatchKind("flux", options.overridden(options.by_place_of_attention)),
    "EasyCache on Flux": PatchKind("flux", conditions.cached("EasyCacheNode"), steps=6),
    "attn1_patch in Qwen-Image": PatchKind("qwen_image", put(options.flux_inputs, "attn1_patch")),
    "attn1_patch in Wan": PatchKind("wan", put(options.wan_output, "attn1_patch")),
    "attn2_patch in Wan": PatchKind("wan", put(options.wan_output, "attn2_patch")),
    "double_block wrapped in Wan": PatchKind("wan", options.block_replaced(options.around, "double_block", 1)),
    "EasyCache on Wan": PatchKind("wan", conditions.cached("EasyCacheNode"), steps=6),
}
GUARDED = {
    "ControlNet of a UNet": PatchKind("sdxl", positive=conditions.controlled, chosen=TWO_PASSES),
    "two ControlNets of a UNet": PatchKind("sdxl", positive=conditions.controlled_twice, chosen=TWO_PASSES),
    "mask on a UNet": other_shape("sdxl", positive=conditions.in_two_masks),
    "mask with bounds on a UNet": other_shape("sdxl", positive=conditions.in_bounds_of_a_mask),
    "area": other_shape("sdxl", positive=conditions.in_an_area),
    "longer prompt on a UNet": longer_prompt("sdxl"),
    "ControlNet of Flux": PatchKind("flux", positive=conditions.controlled, chosen=TWO_PASSES),
    "two ControlNets of Flux": PatchKind("flux", positive=conditions.controlled_twice, chosen=TWO_PASSES),
    "mask on Flux": other_shape("flux", positive=conditions.in_two_masks),
    "mask with bounds on Flux": other_shape("flux", positive=conditions.in_bounds_of_a_mask),
    "longer prompt on Flux": longer_prompt("flux"),
    "longer prompt on Wan": longer_prompt("wan"),
    "context windows": other_shape("wan", conditions.windowed, chosen={**TWO_PASSES, "length": 33}),
    "LoRA in low memory": PatchKind("flux", weights.lora, chosen={"cfg": 1.0, "share": 0.0}),
    "LoRA in bypass mode": PatchKind("flux", weights.bypass_lora),
    **{
        f"object patch of {path}": PatchKind("flux", weights.object_at(path), error=KeyError)
        for path in ("double_blocks.0", "single_blocks.2", "single_blocks.2.linear1", "double_blocks.1.img_mlp")
    },
    **{
        f"object patch of {path}.forward": PatchKind("flux", weights.forward_at(path))
        for path in ("single_blocks.2", "single_blocks.2.linear1", "double_blocks.1.img_mlp", "double_blocks.1")
    },
    **{
        f"object patch of {path}.__class__": PatchKind("flux", weights.class_at(path))
        for path in ("double_blocks.0", "single_blocks.2.norm")
    },
    "object that reads its place": PatchKind(
        "wan", weights.object_at("blocks.1.self_attn", weights.PlaceReader), error=KeyError
    ),
    "forward that reads its place": PatchKind("wan", weights.place_reading_forward("blocks.2.self_attn")),
}
WEIGHTS = {
    "LoRA merged": PatchKind("flux", weights.lora),
    "two LoRA merged": PatchKind("flux", weights.two_loras),
    "LoRA with a schedule": PatchKind("flux", positive=weights.scheduled_lora, steps=4),
    "two LoRA with schedules": PatchKind("flux", positive=weights.two_scheduled_loras, steps=4),
    "models merged": PatchKind("flux", lambda m: weights.merged_with(weights.other_flux(), 0.4)(m)),
    "model replaced by merging": PatchKind("flux", lambda m: weights.merged_with(weights.other_flux(), 0.0)(m)),
}


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo():
    """In place of the one for each test: a way's graphs of a model, which no patch changes, serve all kinds."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def last_compiled():
    """The model of the last test by way and inputs: what compiles it once for all kinds in a row."""
    return {}


@pytest.fixture
def goes_wrong(tiny, engine, last_compiled):
    """goes_wrong(way, kind): asserts it, and that the patch, and nothing else, is what goes wrong."""

    def check(way, kind):
        key = (way, kind.model, *kind.chosen.items())
        if key not in last_compiled:
            torch._dynamo.reset()
            last_compiled.clear()
            last_compiled[key] = Unsound(way, tiny, engine, kind.model, **kind.chosen)
        runs = last_compiled[key]
        runs.steps = kind.steps
        plain, compiled = runs.run(runs.patcher), way(runs.patcher)
        same(runs.run(compiled), plain)
        with pytest.raises(kind.error, match=MESSAGES[kind.error]):
            runs.check(kind.patch, **kind.inputs(runs))
        same(runs.run(compiled), plain)

    return check


@pytest.mark.parametrize("kind", IN_OPTIONS.values(), ids=IN_OPTIONS)
def test_wrong_with_options_hidden_from_the_guards(goes_wrong, kind):
    goes_wrong(without_guards_on_options, kind)


@pytest.mark.parametrize("kind", GUARDED.values(), ids=GUARDED)
def test_wrong_without_guards(goes_wrong, kind):
    goes_wrong(without_guards, kind)


@pytest.mark.parametrize("kind", WEIGHTS.values(), ids=WEIGHTS)
def test_wrong_with_frozen_weights(goes_wrong, kind):
    goes_wrong(with_frozen_weights, kind)


def test_right_with_all_guards(tiny, engine):
    """It is the hiding that goes wrong, not that core compiles, and the whole model."""
    torch._dynamo.reset()
    kind = IN_OPTIONS["attn1_output_patch in Flux"]
    Unsound(lambda patcher: compiled_by_core(patcher, None), tiny, engine, kind.model, **kind.chosen).check(kind.patch)


@pytest.mark.parametrize("path", ["double_blocks.0", "single_blocks.2.linear1"])
def test_forward_hooks_wrong_without_guards(tiny, engine, path):
    torch._dynamo.reset()
    with pytest.raises(Differs, match="with the hook:"):
        Unsound(without_guards, tiny, engine, "flux", cfg=1.0).check_hook(path)
