"""What could make decoding faster, before anything is built for it: whole VAEs of the host with random weights, on one latent.

    python -m benchmarks.vae --host COMFYUI --models flux sdxl wan14 [--tiny]

`channels_last`: our functions for UNets around the plain decoder (blocks/channels_last.py), nothing compiled. `weights`: only
the weights turned. `compiled`: torch.compile of the decoder for any size, as KJNodes' TorchCompileVAE does it; `both`: compiled
with turned weights. Through `VAE.decode`, so with the host's casts and memory management; each variant has a VAE of its own.
"""

import argparse
import json
import os
import statistics
import time
from importlib import import_module

from . import models, session, session_files

VARIANTS = ("eager", "channels_last", "weights", "compiled", "both")
TINY = {"flux": "flux_small", "sdxl": "sdxl_small", "wan14": "wan_small"}


def make(name: str, device):
    """The host's VAE of such a model."""
    import comfy.sd
    import torch

    with torch.device("meta"):
        shapes = session_files.vae_class(name).state_dict()
    generator = torch.Generator(device=device).manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return comfy.sd.VAE({k: models.random_weight(k, s.shape, dtype, device, generator).cpu() for k, s in shapes.items()})


def change(vae, variant: str) -> None:
    import torch

    network = vae.first_stage_model
    if variant in ("weights", "both"):
        video = any(p.dim() == 5 for p in network.parameters())
        network.to(memory_format=torch.channels_last_3d if video else torch.channels_last)
    if variant in ("compiled", "both"):
        network.decoder.forward = torch.compile(network.decoder.forward, dynamic=True)
    if variant == "channels_last":
        channels_last = import_module(f"{session.KIT}.engine.blocks.channels_last")
        kernels = import_module(f"{session.KIT}.engine.host.graphs.norm_kernels").kernels()
        if kernels is None:
            raise SystemExit("channels_last: Triton is not installed")
        decode = network.decode
        network.decode = lambda *args, **kwargs: channels_last.run_channels_last(kernels, decode, args, kwargs)


def measure(name: str, variant: str, device, rounds: int) -> tuple[dict, object]:
    import torch

    on_gpu, before = device.type == "cuda", session.counts()
    vae, latent = make(name, device), models.latent(name)
    latent = torch.randn(latent.shape, generator=torch.Generator().manual_seed(4))
    change(vae, variant)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        with torch.inference_mode():
            image = vae.decode(latent)
        seconds.append(time.perf_counter() - began)
    row = {"kind": "vae", "model": name, "variant": variant, "first": round(seconds[0], 3)}
    row["seconds"] = round(statistics.median(seconds[1:]), 4)
    row |= {key: count - before[key] for key, count in session.counts().items()}
    if on_gpu:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row, image.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--models", nargs="+", choices=list(TINY), default=list(TINY))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="narrow decoders, for a CPU")
    options = parser.parse_args()
    torch = session.enter(options.host)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in options.models:
        expected = None
        for variant in options.variants:
            try:
                row, image = measure(TINY[model] if options.tiny else model, variant, device, options.rounds)
            except Exception as error:
                print(
                    "ROW", json.dumps({"kind": "vae", "model": model, "variant": variant, "died": str(error)[:200]}), flush=True
                )
                continue
            expected = image if expected is None else expected
            row["largest_error"] = round(float((image - expected).abs().max()), 4)  # of an image from 0 to 1
            print("ROW", json.dumps(row), flush=True)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
