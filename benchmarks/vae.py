"""Decoding: whole VAEs of the host with random weights, as they are, with VAE Channels Last, and compiled as KJNodes does.

    python -m benchmarks.vae --host COMFYUI --models flux sdxl qwen wan hunyuan ltx [--variants eager ours compiled] [--tiny]

Through `VAE.decode`, so with the host's casts and memory management; each variant has a VAE of its own. `ours` is the node's
way from the first call on: the first is plain, then both ways are timed, then the faster one stays (`channels_last`). `weights`
turns only the weights, as `both` does before it compiles. `encode` is timed for `ours` and `eager`.
"""

import argparse
import json
import os
import statistics
import time
from importlib import import_module

from . import models, session, session_files

VARIANTS = ("eager", "ours", "compiled", "weights", "both")
# Latents of 1024x1024, 1328x1328, and videos: 832x480 with 33 frames, 768x512 with 97.
LATENTS = {
    "flux": (1, 16, 128, 128), "sdxl": (1, 4, 128, 128), "qwen": (1, 16, 1, 166, 166), "wan": (1, 16, 9, 60, 104),
    "hunyuan": (1, 16, 9, 60, 104), "ltx": (1, 128, 13, 16, 24),
}  # fmt: skip
CALLS = 8


def network(name: str, tiny: bool):
    """The network that comfy.sd.VAE makes for such a file."""
    if name in ("flux", "sdxl"):
        return session_files.vae_class(f"{name}_small" if tiny else name)
    if name in ("qwen", "wan"):
        return session_files.vae_class("wan_small" if tiny else "wan14")
    if name == "hunyuan":
        from comfy.ldm.models.autoencoder import AutoencoderKL

        return AutoencoderKL(ddconfig={**session_files.VAE, "z_channels": 16, "conv3d": True, "time_compress": 4}, embed_dim=16)
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=1)


def make(name: str, device, tiny: bool):
    """The host's VAE of such a model."""
    import comfy.sd
    import torch

    with torch.device("meta"):
        shapes = network(name, tiny).state_dict()
    generator = torch.Generator(device=device).manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return comfy.sd.VAE({k: models.random_weight(k, s.shape, dtype, device, generator).cpu() for k, s in shapes.items()})


def change(vae, variant: str):
    """The VAE to be used."""
    import torch

    decoder = vae.first_stage_model
    if variant == "ours":
        return import_module(f"{session.KIT}.engine.host.vae.attach").attach_vae(vae)
    if variant in ("weights", "both"):
        video = any(p.dim() == 5 for p in decoder.parameters())
        decoder.to(memory_format=torch.channels_last_3d if video else torch.channels_last)
    if variant in ("compiled", "both"):
        decoder.decoder.forward = torch.compile(decoder.decoder.forward, dynamic=True)
    return vae


def timed(call, given) -> tuple[list[float], object]:
    """Seconds of each call, and the last one's result.

    Behind the first, what is made in the background is waited for: between two images of a person there is time for that.
    """
    import torch

    seconds = []
    for number in range(CALLS):
        if number == 1:
            import_module(f"{session.KIT}.engine.background.thread").compiler.wait(60)
        began = time.perf_counter()
        with torch.inference_mode():
            result = call(given)
        seconds.append(time.perf_counter() - began)
    return seconds, result


def measure(name: str, variant: str, device, tiny: bool) -> tuple[dict, object]:
    import torch

    on_gpu, before = device.type == "cuda", session.counts()
    vae = change(make(name, device, tiny), variant)
    shape = [min(n, 8) if tiny and i > 1 else n for i, n in enumerate(LATENTS[name])]
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, image = timed(vae.decode, latent)
    row = {"kind": "vae", "model": name, "variant": variant, "latent": shape, "dtype": str(vae.vae_dtype)}
    row |= {"first": round(seconds[0], 3), "seconds": round(statistics.median(seconds[-3:]), 4)}
    row |= {key: count - before[key] for key, count in session.counts().items()}
    if on_gpu:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if variant in ("eager", "ours"):
        pixels = image[0] if image.dim() == 5 else image
        row["encode"] = round(statistics.median(timed(vae.encode, pixels)[0][-3:]), 4)
    if variant == "ours":
        trials = {n: getattr(p, "trial", None) for n, p in vae.patcher.object_patches.items()}
        row["channels_last"] = {n: trial.other for n, trial in trials.items() if trial is not None}
    return row, image.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--models", nargs="+", choices=list(LATENTS), default=list(LATENTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "ours"])
    parser.add_argument("--tiny", action="store_true", help="narrow networks and small latents, for a CPU")
    options = parser.parse_args()
    torch = session.enter(options.host)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in options.models:
        expected = None
        for variant in options.variants:
            try:
                row, image = measure(model, variant, device, options.tiny)
                expected = image if expected is None else expected
                row["largest_error"] = round(float((image - expected).abs().max()), 4)  # of an image from 0 to 1
                row["mean_error"] = round(float((image - expected).abs().mean()), 5)
            except Exception as error:
                row = {"kind": "vae", "model": model, "variant": variant, "died": f"{type(error).__name__}: {error}"[:300]}
            print("ROW", json.dumps(row), flush=True)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
