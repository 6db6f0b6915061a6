"""Block Swap beside whole blocks moved by hooks, as WanVideoWrapper's block swap does: Flux with a part of its weights in RAM.

python -m benchmarks.block_swap --host COMFYUI --model flux --blocks 24
"""

import argparse
import json
import os
from importlib import import_module

from . import models, session, variants


def with_hooks(patcher, count: int, device):
    """Each of the last `count` blocks goes to the GPU before it runs and back behind it; returns how to end that."""
    network = patcher.model.diffusion_model
    blocks = [*getattr(network, "double_blocks", []), *getattr(network, "single_blocks", [])] or list(network.blocks)
    handles = []
    for block in blocks[len(blocks) - count :]:
        block.to("cpu")
        handles.append(block.register_forward_pre_hook(lambda module, _args: module.to(device) and None))
        handles.append(block.register_forward_hook(lambda module, _args, _out: module.to("cpu") and None))

    def end():
        for handle in handles:
            handle.remove()
        network.to(device)

    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch = session.enter(options.host)
    import comfy.model_management

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patcher = models.build(options.model, device)
    swap = import_module(f"{session.KIT}.engine.host.weights.swap").swap_blocks
    expected = None
    for variant in ("resident", "swap eager", "swap ours", "hooks"):
        model, end = patcher, lambda: None
        if variant == "hooks":
            end = with_hooks(patcher, options.blocks, device)
        elif variant != "resident":
            comfy.model_management.unload_all_models()
            model = swap(patcher, options.blocks).patcher
            model = variants.apply("ours", model, session.KIT, compile="at once") if variant == "swap ours" else model
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row = {"kind": "block_swap", "model": options.model, "variant": variant, "blocks": options.blocks}
        try:
            with torch.inference_mode():
                _, first = session.sample(model, options.model, 2)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                latent, steps = session.sample(model, options.model, options.steps)
            expected = latent if expected is None else expected
            row |= {"first": round(first[0], 3), "step": round(session.median(steps[1:]), 4)}
            row["error"] = round(session.relative_error(latent, expected), 5)
            row["loaded_gib"] = round(patcher.model.model_loaded_weight_memory / 2**30, 2)
            if device.type == "cuda":
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        except Exception as error:
            row["died"] = f"{type(error).__name__}: {error}"[:300]
        end()
        print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
