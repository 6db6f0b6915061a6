"""LoRA training through the host's TrainLoraNode: seconds a step, eager and behind Torch Compile Model.

    python -m benchmarks.training --host COMFYUI --model flux --batch 1 --depth 2 --variants eager ours

`--depth 0` is without gradient checkpointing. The trainer's own model is built again with random weights, as the host loads its
file again. Losses are those of the same seed; where they differ is told in docs/figures.md.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

from . import models, session, variants


def measure(options, variant: str, patcher, device) -> dict:
    import comfy_extras.nodes_train as training
    import torch

    times = []

    class Bar:
        """In place of the node's progress bar: told after each step."""

        def __init__(self, _total):
            pass

        def update(self, _steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            print(f"step {len(times)} after {times[-1] - began:.1f} s", flush=True)

    training.ProgressBar = Bar
    model = variants.apply(variant, patcher, session.KIT, **json.loads(options.settings))
    positive = [[t, dict(extra)] for t, extra in models.conditioning(options.model)[0]]
    size = models.latent(options.model, options.size and (options.size, options.size, 1))
    latents = [{"samples": torch.randn(size.shape, generator=torch.Generator().manual_seed(n))} for n in range(options.batch)]
    inputs = {
        "model": model, "batch_size": options.batch, "steps": options.steps, "grad_accumulation_steps": 1,
        "learning_rate": 1e-4, "rank": 16, "optimizer": "AdamW", "loss_function": "MSE", "seed": 3,
        "training_dtype": options.dtype, "lora_dtype": options.dtype,
        "quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": options.depth > 0,
        "checkpoint_depth": options.depth or 1, "offloading": False, "existing_lora": "[None]", "bucket_mode": False,
        "bypass_mode": options.bypass,
    }  # fmt: skip
    row = {"kind": "training", "variant": variant, "model": options.model, "batch": options.batch, "depth": options.depth}
    row |= {"bypass": options.bypass, "cudnn": not options.without_cudnn}
    before = session.counts()
    patcher.model.to("cpu")  # a trainer needs the room, and the host's loader would give it back
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = []
    began = time.perf_counter()
    print("training begins", flush=True)
    try:
        with torch.inference_mode():
            given = {name: [value] for name, value in inputs.items()}
            _lora, losses, _ = training.TrainLoraNode.execute(**given, latents=latents, positive=[positive]).args
        steps = [after - earlier for earlier, after in itertools.pairwise(times)]
        row |= {"first": round(times[0] - began, 2), "step": round(session.median(steps), 4), "losses": losses["loss"]}
    except Exception as error:
        row["died"] = f"{type(error).__name__}: {error}"[:300]
    row |= {key: count - before[key] for key, count in session.counts().items()}
    row["steps"] = [round(seconds, 3) for seconds in steps]
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    if variant == "ours":
        from importlib import import_module

        row["notes"] = import_module(f"{session.KIT}.engine.host.model.attach").notes_about(model)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--size", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--bypass", action="store_true")
    parser.add_argument(
        "--without-cudnn", action="store_true", help="attention of other kernels: with cuDNN's eager ends in an error"
    )
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--variants", nargs="+", default=["eager", "ours"], help="the last option; a process each")
    options = parser.parse_args()
    if len(options.variants) > 1:  # what one that died has left in memory is not the next one's
        given = sys.argv[1 : sys.argv.index("--variants")] if "--variants" in sys.argv else sys.argv[1:]
        for variant in options.variants:
            subprocess.run([sys.executable, "-m", "benchmarks.training", *given, "--variants", variant], check=False)
        return
    torch = session.enter(options.host)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.without_cudnn:
        import comfy.ops

        comfy.ops.SDPA_BACKEND_PRIORITY[:] = [b for b in comfy.ops.SDPA_BACKEND_PRIORITY if "CUDNN" not in b.name]
    patcher = models.build(options.model, device)
    with torch.inference_mode(False):
        patcher.cached_patcher_init = (lambda _name, disable_dynamic=False: _again(options.model, device), (options.model,))
    print("ROW", json.dumps(measure(options, options.variants[0], patcher, device)), flush=True)
    os._exit(0)


def _again(name: str, device):
    """The trainer's model; its weights are no inference tensors."""
    import torch

    with torch.inference_mode(False):
        return models.build(name, device, inference=False)


if __name__ == "__main__":
    main()
