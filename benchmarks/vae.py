"""Decoding: whole VAEs of the host with random weights, as they are, with VAE Channels Last, and compiled by KJNodes' node.

    python -m benchmarks.vae --host COMFYUI --models flux sdxl [--variants eager ours kjnodes --kjnodes FILE] [--tiny]

Through `VAE.decode`, so with the host's casts and memory management; each variant has a VAE of its own. `ours` is the node's
way from the first call on: the first is plain, then both ways are timed, then the faster one stays (`channels_last`).
`encode` is timed for `ours` and `eager`. Rows of `compiled`, `weights` and `both` in results files are of earlier versions.
"""

import argparse
import json
import os
import statistics
import time
from importlib import import_module

from . import models, session, session_files, variants

VARIANTS = ("eager", "ours", "kjnodes")
# Latents of 1024x1024, 1328x1328, and videos: 832x480 with 33 frames, 768x512 with 97.
LATENTS = {
    "flux": (1, 16, 128, 128), "sdxl": (1, 4, 128, 128), "qwen": (1, 16, 1, 166, 166), "wan": (1, 16, 9, 60, 104),
    "hunyuan": (1, 16, 9, 60, 104), "ltx": (1, 128, 13, 16, 24),
}  # fmt: skip
CALLS = 13
LAST = 5


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


def change(vae, variant: str, kjnodes: str | None):
    """The VAE to be used."""
    if variant == "ours":
        return import_module(f"{session.KIT}.engine.host.vae.attach").attach_vae(vae)
    return variants.kjnodes_vae(vae, kjnodes) if variant == "kjnodes" else vae


class Measured:
    """One VAE, used in its way; what it took."""

    def __init__(self, name: str, variant: str, device, options):
        self.variant, self.vae = variant, change(make(name, device, options.tiny), variant, options.kjnodes)
        self.decodes: list[float] = []
        self.encodes: list[float] = []
        self.row = {
            "kind": "vae",
            "model": name,
            "variant": variant,
            "dtype": str(self.vae.vae_dtype),
            "graphs": 0,
            "breaks": 0,
        }

    def call(self, method: str, given):
        """What the VAE's method gives; its seconds are added to `decodes` or `encodes`."""
        import torch

        on_gpu, before, began = torch.cuda.is_available(), session.counts(), time.perf_counter()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            result = getattr(self.vae, method)(given)
        getattr(self, f"{method}s").append(time.perf_counter() - began)
        for key, count in session.counts().items():
            self.row[key] += count - before[key]
        if on_gpu and method == "decode":
            self.row["peak_gib"] = max(self.row.get("peak_gib", 0.0), round(torch.cuda.max_memory_allocated() / 2**30, 2))
        return result

    def finish(self) -> dict:
        """The row: seconds are the median of the last calls of each way."""
        for key, seconds in (("seconds", self.decodes), ("encode", self.encodes)):
            if seconds:
                self.row[key] = round(statistics.median(seconds[-LAST:]), 4)
        self.row |= {"first": round(self.decodes[0], 3), "calls": [round(s, 4) for s in self.decodes]}
        if self.variant == "ours":
            trials = {n: getattr(p, "trial", None) for n, p in self.vae.patcher.object_patches.items()}
            self.row["channels_last"] = {n: trial.other for n, trial in trials.items() if trial is not None}
        return self.row


def measure(name: str, device, options):
    """Rows of the variants, which take turns call by call, so that what the GPU's clock does falls on each alike."""
    import torch

    shape = [min(n, 8) if options.tiny and i > 1 else n for i, n in enumerate(LATENTS[name])]
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    running, expected = [Measured(name, variant, device, options) for variant in options.variants], None
    for number in range(CALLS):
        if number == 1:  # between two images of a person there is time for what is made in the background
            import_module(f"{session.KIT}.engine.background.thread").compiler.wait(60)
        for one in list(running):
            try:
                image = one.call("decode", latent).float()
                if one.variant in ("eager", "ours"):
                    one.call("encode", image[0] if image.dim() == 5 else image)
            except Exception as error:
                running.remove(one)
                yield one.row | {"died": f"{type(error).__name__}: {error}"[:300]}
                continue
            expected = image if expected is None else expected
            one.row["largest_error"] = round(float((image - expected).abs().max()), 4)  # of an image from 0 to 1
            one.row["mean_error"] = round(float((image - expected).abs().mean()), 5)
    for one in running:
        yield one.finish() | {"latent": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--models", nargs="+", choices=list(LATENTS), default=list(LATENTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "ours"])
    parser.add_argument("--kjnodes", help="its nodes/model_optimization_nodes.py, for the variant kjnodes")
    parser.add_argument("--vram", choices=["dynamic", "legacy"], default="dynamic", help="dynamic: as the host manages a GPU")
    parser.add_argument("--tiny", action="store_true", help="narrow networks and small latents, for a CPU")
    options = parser.parse_args()
    torch = session.enter(options.host, dynamic_vram=options.vram == "dynamic" and os.path.exists("/dev/nvidia0"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in options.models:
        for row in measure(model, device, options):
            print("ROW", json.dumps(row), flush=True)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
