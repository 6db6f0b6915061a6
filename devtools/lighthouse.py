"""Write the demo's model, a tiny Flux that has learned one picture, and the decoder that paints it, for ComfyUI's loaders.

The weights are data. The code that made them is in git at f53a9b8: this file drew the scene, sixteen shapes as distances from
their edges, one shape for each channel of the latent, and computed a TAESD decoder that paints each shape with its colour;
train_lighthouse.py trained the Flux. Import this module only where ComfyUI is on sys.path.
"""

from pathlib import Path

import comfy.taesd.taesd
import safetensors.torch
import torch

WEIGHTS = Path(__file__).with_suffix(".safetensors")
# The scene, (1, 16, HEIGHT / 8, WIDTH / 8), and those weights of the decoder that are not zero.
PICTURE = WEIGHTS.with_name("lighthouse-picture.safetensors")
VAE = "lighthouse-vae.safetensors"
# Pixels of the whole scene; a narrower image shows its left part.
WIDTH, HEIGHT = 512, 512
NARROW = 384
CHANNELS = 16
# The number of tokens of the prompt, and their width: the prompt is an identity matrix, and txt_in the only text encoder.
TOKENS = 32
# Constants of ComfyUI's latent format for Flux, undone here so that the decoder gets the model's own output.
SCALE, SHIFT = 0.3611, 0.1159


def scene():
    """The latent that the model is to draw."""
    return safetensors.torch.load_file(PICTURE)["scene"].float()


def decoder():
    """The weights of ComfyUI's TAESD that paint the scene."""
    known = safetensors.torch.load_file(PICTURE)
    state = comfy.taesd.taesd.TAESD(latent_channels=CHANNELS).state_dict()
    state = {key: known[key].float() if key in known else torch.zeros_like(value) for key, value in state.items()}
    return {**state, "vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}


def distance_from_scene(latent):
    """Mean distance of a latent, as ComfyUI saves it, from the scene."""
    drawn = (latent - SHIFT) * SCALE
    return float((drawn - scene()[..., : latent.shape[-1]]).abs().mean())


def write(models):
    """Write the model, in full precision, and the VAE into a server's models/."""
    for folder, name, state in (
        ("diffusion_models", WEIGHTS.name, {k: v.float() for k, v in safetensors.torch.load_file(WEIGHTS).items()}),
        ("vae", VAE, decoder()),
    ):
        (models / folder).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(state, str(models / folder / name))
