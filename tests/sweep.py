"""Every set-up of the zoo, compiled block by block and compared with eager.

As a script it writes benchmarks/results/compatibility.json, from which the README's table is made:
    python tests/sweep.py --host COMFYUI [--backend eager] [names...]
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import torch
import zoo


@dataclass
class Outcome:
    """What compiling one set-up came to.

    Args:
        kinds: block kinds that ran: a class, a structure and a shape within one call of the model.
        graphs: compiled at the first shape.
        graphs_after: compiled at the other sizes, prompt lengths and batches, all together.
        error: largest absolute difference to eager, over the largest absolute value of eager.
        eager: class -> why it is not compiled.
    """

    name: str
    blocks: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    share: float = 0.0
    whole_model: bool = False
    kinds: int = 0
    graphs: int = 0
    graphs_after: int = 0
    graphs_again: int = 0
    breaks: int = 0
    error: float = 0.0
    eager: dict[str, str] = field(default_factory=dict)
    recompiles: list[str] = field(default_factory=list)
    seconds: float = 0.0


def runs_of(setup) -> list[dict]:
    """Arguments of `Setup.inputs`: the first shape twice (steps), then sizes, prompts, batches, then all of them again."""
    batch = setup.max_batch or 2
    changes = [{"size": 1, "batch": batch}]
    if setup.text is not None and not setup.fixed_tokens:
        changes.append({"size": 0, "batch": batch, "tokens": setup.tokens + 9})
    changes.append({"size": 2, "batch": setup.max_batch or 3})
    changes.append({"size": 0, "batch": 1})
    changes.append({"size": 2, "batch": 1})
    return changes


def run_setup(engine, setup, backend: str = "eager", **settings) -> Outcome:
    """Compile `setup` and compare every run with eager.

    Args:
        engine: engine("settings") is that module of the loaded pack.
    """
    # On a CPU convolutions choose their kernel by size, with a guard for each choice; GPUs do not.
    with torch.backends.mkldnn.flags(enabled=False):
        return _run_setup(engine, setup, backend, settings)


def _run_setup(engine, setup, backend: str, settings: dict) -> Outcome:
    began = time.perf_counter()
    attachment, report = engine("host.attachment"), engine("report")
    chosen = engine("settings").CompileSettings(**{"backend": backend, "compile": "at once", **settings})
    model = setup.build()
    network = model.diffusion_model
    plan = engine("binding").plan_for(network)
    outcome = Outcome(setup.name, len(plan.blocks), share=round(plan.covered_share, 3), whole_model=plan.whole_model)
    for block in plan.blocks:
        outcome.classes[block.class_name] = outcome.classes.get(block.class_name, 0) + 1
    compiler = attachment.BlockCompiler(chosen)

    def graphs() -> int:
        return report.stats_for(network, chosen).graphs

    def compare(percent: float = 0.4, **shape) -> None:
        clear_state(network)
        expected = call(model, setup.inputs(model=model, percent=percent, **shape))
        clear_state(network)
        actual = call(model, setup.inputs(model=model, percent=percent, **shape), compiler)
        difference = (actual - expected).abs().max() / expected.abs().max()
        outcome.error = max(outcome.error, difference.item())

    first = {"size": 0, "batch": setup.max_batch or 2}
    compare(**first)
    outcome.graphs = graphs()
    kinds = report.kinds_for(network, chosen)
    outcome.kinds = len(kinds)
    compare(percent=0.6, **first)
    for shape in runs_of(setup):
        compare(**shape)
    outcome.graphs_after = graphs() - outcome.graphs
    for shape in [first, *runs_of(setup)]:
        compare(percent=0.8, **shape)
    outcome.graphs_again = graphs() - outcome.graphs - outcome.graphs_after
    stats = report.stats_for(network, chosen)
    outcome.breaks = stats.graph_breaks
    outcome.recompiles = sorted({f"{r.block}: {r.guard.partition(': ')[2] or r.guard}"[:160] for r in stats.recompiles})
    outcome.eager = {kind.class_name: kind.failure.reason for kind in report.kinds_for(network, chosen) if kind.failure}
    outcome.seconds = round(time.perf_counter() - began, 1)
    return outcome


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
    state = "eager: " + ", ".join(outcome.eager) if outcome.eager else "ok"
    return (
        f"{outcome.name:28} {outcome.blocks:3} blocks {outcome.share:4.0%} {outcome.kinds:3} kinds {outcome.graphs:3} graphs "
        f"+{outcome.graphs_after} +{outcome.graphs_again} {outcome.breaks} breaks {outcome.error:.1e} "
        f"{outcome.seconds:5.1f}s {state}"
    )


def main() -> None:
    import argparse
    import json
    from importlib import import_module
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--dynamic", default="auto")
    parser.add_argument("--out")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    outcomes = []
    shared = import_module("torch_compile_kit.engine.registry")._kinds
    with torch.inference_mode():
        for name in options.names or zoo.SETUPS:
            torch._dynamo.reset()
            shared.clear()  # models of one structure share compiled code, and its counts
            try:
                outcome = run_setup(
                    lambda module: import_module(f"torch_compile_kit.engine.{module}"),
                    zoo.SETUPS[name],
                    options.backend,
                    dynamic=options.dynamic,
                )
            except Exception as error:
                print(f"{name:28} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            outcomes.append(outcome)
            print(as_row(outcome), flush=True)
            for line in [*outcome.recompiles[:4], *outcome.eager.values()] if options.names else []:
                print("    ", line, flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
