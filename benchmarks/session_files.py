"""Files that the host's loaders read: a model, its VAE and a LoRA, with random weights of the real sizes.

python -m benchmarks.session_files --host COMFYUI --model flux --folder BASE/models
"""

import argparse
import os
import time
from pathlib import Path

from . import lora, models, session

VAE = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
WAN_VAE = {
    "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip


def vae_class(name: str):
    """The autoencoder that comfy.sd.VAE makes for such a model's file, with a narrow decoder for the small ones."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine
    from comfy.ldm.wan.vae import WanVAE

    small = name.endswith("_small")
    if models.MODELS[name].video:
        return WanVAE(**{**WAN_VAE, "dim": 16 if small else WAN_VAE["dim"]})
    size = {**VAE, "z_channels": models.MODELS[name].channels}
    part = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{part}.Encoder", "params": size},
        decoder_config={"target": f"{part}.Decoder", "params": {**size, "ch": 32 if small else size["ch"]}},
    )


def write(name: str, folder: Path) -> None:
    """`name`.safetensors in diffusion_models, vae and loras of `folder`; what is there stays."""
    import safetensors.torch
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def vae_weights() -> dict:
        with torch.device("meta"):
            shapes = vae_class(name).state_dict()
        generator = torch.Generator(device=device).manual_seed(3)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return {key: models.random_weight(key, s.shape, dtype, device, generator).cpu() for key, s in shapes.items()}

    def lora_weights() -> dict:
        return lora.lora_weights(models.MODELS[name].host_config().get_model({}, "", torch.device("meta")).diffusion_model, 1)

    making = {"loras": lora_weights, "vae": vae_weights}
    if models.MODELS[name].family is None:
        making["diffusion_models"] = lambda: models.state_dict(name, device)
    for kind, make in making.items():
        file = folder / kind / f"{name}.safetensors"
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        began, unfinished = time.perf_counter(), file.with_suffix(".part")
        safetensors.torch.save_file(make(), str(unfinished))
        unfinished.rename(file)
        print(f"{file}: {file.stat().st_size / 1024**3:.1f} GiB in {time.perf_counter() - began:.0f} s", flush=True)
    if hasattr(os, "sync"):
        os.sync()  # nothing is left to be written while the first prompt reads


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", required=True, choices=list(models.MODELS))
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder.resolve()
    session.enter(options.host)
    write(options.model, folder)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
