"""Set-ups of the zoo, compiled block by block and compared with eager.

As a script it runs the named ones, or all, and puts their rows into a file; rows of others stay:
    python tests/sweep.py --host COMFYUI [--compile "before first image"]
        [--out benchmarks/results/compatibility.json] [names...]
"""

from __future__ import annotations

import gc
import json
import sys
import time
import types
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from support import lower_here
from torch.utils import _pytree as pytree

# The name under which the script loads the engine; without the nodes, which need the host's server.
KIT = "torch_compile_kit_sweep"
# Variants of one class that exercise the code of another set-up; the script sweeps them too.
NEAR_DUPLICATES = set(
    """
    sd15_inpaint sd15_ip2p sd20 sd21_unclip sd21_unclip_h lotus sdxl_ip2p ssd1b koala koala_1b vega sv3d_u sv3d_p
    cascade_b flux_schnell flux_uxo flux_mask flux_fill flux_control flux2_edit flux2_klein chroma_radiance_linear
    hunyuan_video_mask hunyuan_custom skyreels_i2v hunyuan_video_15_i2v hunyuan_image21_distilled wan21_bernini
    wan21_flf2v wan21_fun_control wan21_flow_rvs wan22_i2v wan22_5b_i2v wan22_camera wan_humo_17b wan_causal_cached
    wan_scail2 sd35_medium pixart_alpha hunyuan_dit1 qwen_image_mask qwen_image_edit_2511 qwen_image_layered
    mageflow_edit newbie z_image_pixel omnigen2_edit boogu_edit hidream_e1 hidream_o1_edit krea2_edit ideogram4_mask
    joyimage_edit pid pid15 ltxv_i2v ltxav_connectors ltxav_23 anima cosmos1_i2v cosmos_predict2_i2v cogvideox_5b
    cogvideox_i2v cogvideox15_i2v cogvideox_inpaint kandinsky5_i2v minimax_h3_keyframe ace_step15_codes
    ace_step15_timbre stable_audio3 hunyuan3d_v2_turbo
    zero123 sdxl_refiner flux_kontext ovis longcat hunyuan_video_i2v hunyuan_image21_refiner hunyuan_video_15_sr
    wan21_i2v wan22_5b wan_camera qwen_image_edit kandinsky5_image
    """.split()  # noqa: SIM905
)


@dataclass
class Outcome:
    """What compiling one set-up came to.

    Args:
        groups: block groups that ran compiled at the first shape: a class, a structure and a form of call.
        graphs: compiled at the first shape.
        graphs_after: compiled at the other sizes, prompt lengths and batches, all together.
        error: largest absolute difference to eager, over the largest absolute value of eager.
        eager: class -> why it is not compiled.
        left_out: class -> how many of its blocks stay eager, since compiling them would save little (UNets).
        parts: class -> how many are compiled in place of the blocks that they are in (UNets).
        idle: classes of blocks that no run called: parts for other inputs, or called by another method than `forward`.
        uncalled: class -> how many blocks, where no run called any block; the report says so.
        inline: class -> why its graphs cannot go to another process, and are lowered in the call that traces them.
        seconds: of the processor, on one thread; the clock on the wall depends on what else runs.
        host, torch: versions of ComfyUI and PyTorch.
    """

    name: str
    blocks: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    share: float = 0.0
    whole_model: bool = False
    groups: int = 0
    graphs: int = 0
    graphs_after: int = 0
    graphs_again: int = 0
    breaks: int = 0
    error: float = 0.0
    eager: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    uncalled: dict[str, int] = field(default_factory=dict)
    inline: dict[str, str] = field(default_factory=dict)
    recompiles: list[str] = field(default_factory=list)
    seconds: float = 0.0
    host: str = ""
    torch: str = ""


def runs_of(setup, brief: bool = False) -> list[dict]:
    """Arguments of `Setup.inputs`: the first shape twice (steps), then sizes, prompts, batches, then all of them again.

    Args:
        brief: another size and another batch alone, for models that are traced anew for each.
    """
    batch = setup.max_batch or 2
    if brief:
        return [{"size": 1, "batch": batch}, {"size": 0, "batch": 1}]
    changes = [{"size": 1, "batch": batch}]
    if setup.text is not None and not setup.fixed_tokens:
        changes.append({"size": 0, "batch": batch, "tokens": setup.tokens + 9})
    changes.append({"size": 2, "batch": setup.max_batch or 3})
    changes.append({"size": 0, "batch": 1})
    changes.append({"size": 2, "batch": 1})
    return changes


def run_setup(engine, setup, backend: str = "eager", brief: bool = False, **settings) -> Outcome:
    """Compile `setup` and compare every run with eager: in the background both while code is made and when it is there.

    Args:
        engine: engine("settings") is that module of the loaded pack.
        brief: see `runs_of`.
    """
    # On a CPU convolutions choose their kernel by size, with a guard for each choice; GPUs do not.
    with torch.backends.mkldnn.flags(enabled=False):
        return _run_setup(engine, setup, backend, runs_of(setup, brief), settings)


def _run_setup(engine, setup, backend: str, shapes: list[dict], settings: dict) -> Outcome:
    began = time.process_time()
    report = engine("messages.report")
    chosen = engine("settings").CompileSettings(**{"backend": backend, **settings})
    if backend != "inductor":
        lower_here(engine, backend)
    model = setup.build()
    network = model.diffusion_model
    plan = engine("compile.binding").plan_for(network)
    outcome = Outcome(setup.name, len(plan.blocks), share=round(plan.covered_share, 3), whole_model=plan.whole_model)
    for block in plan.blocks:
        outcome.classes[block.class_name] = outcome.classes.get(block.class_name, 0) + 1
    compiler = engine("host.model.wrapper").BlockCompiler(model, chosen)

    def graphs() -> int:
        return report.stats_for(network, chosen).graphs

    def compare(percent: float = 0.4, calls: int = 1 if chosen.waits else 2, **shape) -> None:
        clear_state(network)
        expected = call(model, setup.inputs(model=model, percent=percent, **shape))
        assert torch.isfinite(expected).all() and expected.std() > 1e-6, "the set-up shows nothing"
        for _ in range(calls):
            clear_state(network)
            actual = call(model, setup.inputs(model=model, percent=percent, **shape), compiler)
            difference = (actual - expected).abs().max() / expected.abs().max()
            outcome.error = max(outcome.error, difference.item())
            assert engine("background.thread").compiler.wait(120)

    first = {"size": 0, "batch": setup.max_batch or 2}
    compare(**first)
    outcome.graphs = graphs()
    with _forms_of_calls(engine, network) as forms:
        clear_state(network)
        call(model, setup.inputs(model=model, percent=0.4, **first))
    outcome.groups = len(forms)
    compare(percent=0.6, calls=1, **first)
    for shape in shapes:
        compare(**shape)
    outcome.graphs_after = graphs() - outcome.graphs
    for shape in [first, *shapes[::2]]:
        compare(percent=0.8, calls=1, **shape)  # the code is there
    outcome.graphs_again = graphs() - outcome.graphs - outcome.graphs_after
    stats = report.stats_for(network, chosen)
    outcome.breaks = stats.graph_breaks
    outcome.recompiles = sorted({(guard.partition(": ")[2] or guard)[:160] for guard in stats.recompiles})
    groups = engine("compile.registry").code_of(network).groups_of(chosen)
    outcome.eager = {group.class_name: group.failure.reason for group in groups if group.failure}
    outcome.inline = {group.class_name: group.code.why_inline for group in groups if group.code.why_inline}
    code = engine("compile.registry").code_of(network)
    outcome.left_out, outcome.parts = dict(sum(code.eager.values(), Counter())), dict(code.parts)
    ran = {group.class_name for group in groups if group.code.compiles}
    outcome.idle = sorted(set(outcome.classes) - ran - set(outcome.left_out) - _opened(engine, network, plan, outcome.parts))
    outcome.uncalled = dict(code.uncalled or {})
    outcome.seconds = round(time.process_time() - began, 1)
    outcome.host, outcome.torch = host_version(), torch.__version__.partition("+")[0]
    return outcome


@contextmanager
def _forms_of_calls(engine, network):
    """What compiled code must tell apart within one eager call: groups that are compiled, and for each what is passed.

    Of tensors the number of dimensions, and whether contiguous: CogVideoX gives its first block slices of one tensor.
    """
    found, structure_of = set(), engine("cache.structure").structure_of
    kept = engine("compile.registry").code_of(network).groups
    groups = {(group.forward, key[0]) for key, group in kept.items() if group.code.compiles}
    blocks = [m for m in network.modules() if any(type(m).forward is forward for forward, _ in groups)]

    def form(value):
        return (value.dim(), value.is_contiguous()) if isinstance(value, torch.Tensor) else type(value).__name__

    def note(block, args, kwargs):
        given = [v for v in args if not isinstance(v, dict)], {k: v for k, v in kwargs.items() if not isinstance(v, dict)}
        leaves, spec = pytree.tree_flatten(given)
        found.add((type(block), structure_of(block), str(spec), tuple(map(form, leaves))))

    blocks = [block for block in blocks if (type(block).forward, structure_of(block)) in groups]
    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _opened(engine, network, plan, parts: dict[str, int]) -> set[str]:
    """The classes of the blocks in whose place `parts` of them are compiled."""
    blocks = engine("compile.binding").modules_at(network, plan)
    return {type(block).__name__ for block in blocks if any(type(m).__name__ in parts for m in block.modules())}


def host_version() -> str:
    """The version of ComfyUI, for example `0.30.0`."""
    return import_module("comfyui_version").__version__


def clear_state(network) -> None:
    """HiDream-O1 keeps keys and values of the prompt on the network."""
    if hasattr(network, "clear_kv_cache"):
        network.clear_kv_cache()


def call(model, inputs: dict, compiler=None) -> torch.Tensor:
    """One call of the host's `apply_model`, as the sampler makes it."""
    options = inputs.pop("transformer_options", {})
    if compiler is not None:
        options = {**options, "wrappers": {"apply_model": {"torch-compile-kit": [compiler]}}}
    arguments = [inputs.pop(name, None) for name in ("x", "t", "c_concat", "c_crossattn", "control")]
    return model.apply_model(*arguments, options, **inputs).float()


def as_row(outcome: Outcome) -> str:
    state = "eager: " + ", ".join(outcome.eager) if outcome.eager else "ok" if outcome.graphs else "nothing compiled"
    return (
        f"{outcome.name:28} {outcome.blocks:3} blocks {outcome.share:4.0%} {outcome.groups:3} groups {outcome.graphs:3} graphs "
        f"+{outcome.graphs_after} +{outcome.graphs_again} {outcome.breaks} breaks {outcome.error:.1e} "
        f"{outcome.seconds:5.1f}s {state}{''.join(f' in the call: {why}' for why in outcome.inline.values())}"
    )


def write(file: Path, outcomes: list[Outcome]) -> None:
    """Put the rows of `outcomes` into `file`, in the zoo's order; rows of set-ups that did not run stay."""
    import zoo

    found = {row["name"]: row for row in (json.loads(file.read_text()) if file.exists() else [])}
    found |= {outcome.name: asdict(outcome) for outcome in outcomes}
    file.write_text(json.dumps([found[name] for name in zoo.ALL if name in found], indent=1) + "\n")


def enter(host: Path) -> None:
    """Make the host's modules importable, and the engine without the nodes, which need the host's server."""
    sys.path.insert(0, str(host))
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import_module("comfy.options").enable_args_parsing()
    sys.modules[KIT] = package = types.ModuleType(KIT)
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]


def main() -> int:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the folder of ComfyUI")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--dynamic", default="auto")
    parser.add_argument("--compile", default="in background")
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    enter(options.host.resolve())
    import zoo

    outcomes, failed = [], []
    for name in options.names or zoo.SETUPS:
        torch._dynamo.reset()
        gc.collect()  # models of one structure share compiled code, and its counts, while both are in memory
        try:
            with torch.inference_mode():
                outcome = run_setup(
                    lambda module: import_module(f"{KIT}.engine.{module}"),
                    zoo.SETUPS[name],
                    options.backend,
                    dynamic=options.dynamic,
                    compile_when=options.compile,
                )
        except Exception as error:
            failed.append(name)
            print(f"{name:28} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        outcomes.append(outcome)
        print(as_row(outcome), flush=True)
        for line in [*outcome.recompiles[:4], *outcome.eager.values()] if options.names else []:
            print("    ", line, flush=True)
        if options.out:
            write(options.out, [outcome])
    print(
        f"{len(outcomes)} ran, {len(failed)} failed: {' '.join(failed)}; this ComfyUI lacks {' '.join(zoo.LACKING) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
