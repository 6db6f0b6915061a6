"""What newer versions of ComfyUI do to our blocks, as only a GPU shows it.

    python -m benchmarks.newer_hosts casts --host COMFYUI
    python -m benchmarks.newer_hosts planner --host COMFYUI

`casts`: LTX-AV under dynamic VRAM, and how often each layer's weights are cast. `planner`: blocks inside comfy-aimdo's memory
planner (0.6.0 and later).
`planner` wants PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, as ComfyUI's own compiler has it.
"""

import argparse
import functools
import json
import os
import sys
from collections import Counter

from . import run, session, variants


def casts(options) -> dict:
    """Casts of each layer in each call of the model, eager and compiled."""
    session.enter(options.host, dynamic_vram=True)
    import comfy.memory_management
    import comfy.model_patcher
    import comfy.ops
    import comfy.sample
    import torch

    counted: Counter = Counter()
    cast = comfy.ops.cast_modules_with_vbar

    @functools.wraps(cast)  # the pack looks at what it takes
    def counting(comfy_modules, *args, **kwargs):
        counted.update(map(id, comfy_modules))
        return cast(comfy_modules, *args, **kwargs)

    comfy.ops.cast_modules_with_vbar = counting
    sys.path.append(str(run.ROOT / "tests"))
    from zoo import SETUPS

    setup = SETUPS["ltxav"]
    row = {"kind": "casts", "model": setup.name}
    for variant in ("eager", "ours"):
        # Under dynamic VRAM the host makes layers without weights, which come from a file; these come from nowhere.
        comfy.memory_management.aimdo_enabled = False
        model = setup.build()
        comfy.memory_management.aimdo_enabled = True
        patcher = comfy.model_patcher.ModelPatcherDynamic(
            model, load_device=torch.device("cuda", 0), offload_device=setup.device
        )
        patcher = variants.apply(variant, patcher, session.KIT, compile="at once")
        positive, negative = setup.conds()
        calls = []
        network = model.diffusion_model

        def noted(network, *args, calls=calls, **kwargs):
            counted.clear()
            result = network.forward(*args, **kwargs)  # which the pack exchanges for a call
            calls.append(max(counted.values(), default=0))
            return result

        network._forward_hooks.clear()
        type(network).__call__, original = noted, type(network).__call__
        try:
            with torch.inference_mode():
                latent = setup.latent()
                noise = comfy.sample.prepare_noise(latent, 1)
                comfy.sample.sample(
                    patcher, noise, 5, 1.0, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=1
                )
        finally:
            type(network).__call__ = original
        paged = sum("_v" in module.__dict__ for module in network.modules())
        row[variant] = {"paged_layers": paged, "most_casts_of_a_layer": calls}
    row |= session.counts()
    return row


def planner(options) -> dict:
    """Small blocks in three forwards inside a recording, as core's compiler makes it from 0.34 on (comfy/model_prefetch.py)."""
    import torch
    from comfy_aimdo import control, malloc_graph

    control.init()
    control.init_devices([0])
    control.set_log_info()
    row = {"kind": "planner", "allocator": torch.cuda.get_allocator_backend()}

    def block(x, weight):
        y = torch.nn.functional.gelu(x @ weight)
        return x + torch.nn.functional.layer_norm(y, y.shape[-1:])

    x, weight = torch.randn(512, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    expected = x
    for _ in range(4):
        expected = block(expected, weight)
    for name, body, warm in (("eager", block, False), ("compiled, cold", None, False), ("compiled, warm", None, True)):
        for nested in (False, True):  # blocks in the recording itself, or in a scope for the forward
            torch._dynamo.reset()
            run_block = body or torch.compile(block)
            if warm:
                run_block(x, weight)
            found: list = []
            row[f"{name}{', in a scope' if nested else ''}"] = found
            graph = malloc_graph.record(stream)
            try:
                for _ in range(3):
                    y = x
                    if nested:
                        graph.push()
                    for _ in range(4):
                        graph.iterate("block")
                        y = run_block(y, weight)
                    graph.iterate(None)
                    if nested:
                        graph.pop()
                    error = (y - expected).abs().max().item()
                    found.append({"error": round(error, 6), "rogues": graph.rogue_count, "peak": graph.peak_used})
            except Exception as error:
                found.append(f"forward {len(found)}: {type(error).__name__}: {str(error)[:200]}")
            del graph
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["casts", "planner"])
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    row = {"casts": casts, "planner": planner}[options.part](options)
    print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
