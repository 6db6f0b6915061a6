"""Train the tiny Flux of the demo to draw one scene, and write its weights, half precision, beside this file.

    COMFYUI_PATH=FOLDER python -m devtools.train_lighthouse [--minutes 15]

The model is ComfyUI's own class. In flow matching, x = (1 - t) * scene + t * noise, and with a single scene the velocity
noise - scene is known. What the model has to learn is where in the picture a token is: attention to the prompt's tokens tells,
since they stand at position 0, and rotary embeddings turn each of them into a ruler.
"""

import argparse
import math
import tempfile
import time

import torch

from . import inprocess

CONFIG = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": None,
    "hidden_size": 128,
    "num_heads": 1,
    "mlp_ratio": 4.0,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [],
    "yak_mlp": False,
    "txt_norm": False,
}
PEAK_RATE, WARM_STEPS, AVERAGE = 2e-3, 200, 0.998
# For this share of the time only so many random tokens of an image, a quarter of the work; attention over all is learned last.
FEW_TOKENS, FEW = 0.6, 256


def build():
    import comfy.supported_models

    from . import lighthouse

    config = comfy.supported_models.FluxSchnell({**CONFIG, "context_in_dim": lighthouse.TOKENS})
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device=torch.device("cpu")).diffusion_model
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.xavier_uniform_(parameter)
        else:
            torch.nn.init.constant_(parameter, 1.0 if name.endswith(("norm.weight", "norm.scale")) else 0.0)
    # The usual beginning of such models: each block adds nothing yet.
    for name, parameter in model.named_parameters():
        if "mod" in name or name.startswith("final_layer"):
            torch.nn.init.zeros_(parameter)
    for module in model.modules():
        # The host's blocks add to their input in place, which a norm has saved for its gradient.
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    return model.requires_grad_(True)


def velocity_loss(model, scene, prompt, few):
    """Mean square error of the velocity at a random time, of all tokens of an image or of some."""
    noise, t = torch.randn_like(scene), torch.rand(1) * 0.95 + 0.05
    image, ids = model.process_img(t * noise + (1 - t) * scene)
    velocity, _ = model.process_img(noise - scene)
    if few:
        kept = torch.randperm(image.shape[1])[:FEW]
        image, ids, velocity = image[:, kept], ids[:, kept], velocity[:, kept]
    prompt_ids = torch.zeros(1, prompt.shape[1], ids.shape[2])
    return (model.forward_orig(image, ids, prompt, prompt_ids, t, None) - velocity).square().mean()


def train(model, seconds):
    """Returns averaged weights."""
    import comfy.model_management

    from . import lighthouse

    comfy.model_management.in_training = True
    scene, prompt = lighthouse.scene(), torch.eye(lighthouse.TOKENS)[None]
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.9, 0.99), weight_decay=0)
    averaged = {name: value.detach().clone() for name, value in model.state_dict().items()}
    began, step, shown = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - began) / seconds) < 1:
        step += 1
        rate = PEAK_RATE * min(1, step / WARM_STEPS) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        width = lighthouse.NARROW if step % 3 == 0 else lighthouse.WIDTH
        loss = velocity_loss(model, scene[..., : width // 8], prompt, done < FEW_TOKENS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                averaged[name].lerp_(value, 1 - min(AVERAGE, step / (step + 10)))
        shown = loss.item() if step == 1 else 0.99 * shown + 0.01 * loss.item()
        if step % 100 == 0:
            print(f"{time.monotonic() - began:5.0f} s  step {step}  loss {shown:.4f}", flush=True)
    comfy.model_management.in_training = False
    return averaged


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        inprocess.enter_host(base)
        import safetensors.torch

        from . import lighthouse

        weights = train(build(), options.minutes * 60)
    weights = {name: value.half().contiguous() for name, value in weights.items()}
    safetensors.torch.save_file(weights, str(lighthouse.WEIGHTS))
    print(f"{lighthouse.WEIGHTS}: {lighthouse.WEIGHTS.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
