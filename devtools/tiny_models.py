"""Build tiny models with random weights from ComfyUI's own classes, as files for ComfyUI's loaders or as patchers.

Import this module only where ComfyUI is on sys.path. The same name always gives the same weights.
"""

import json
from pathlib import Path

import comfy.clip_model
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import safetensors.torch
import torch
from comfy.ldm.models.autoencoder import AutoencodingEngine

FLUX = dict(
    image_model="flux", in_channels=16, out_channels=16, patch_size=2, vec_in_dim=768, context_in_dim=768, hidden_size=256,
    num_heads=2, mlp_ratio=4.0, depth=2, depth_single_blocks=4, axes_dim=[16, 56, 56], theta=10000, qkv_bias=True,
    guidance_embed=True, txt_ids_dims=[], yak_mlp=False, txt_norm=False,
)  # fmt: skip
WAN = dict(
    image_model="wan2.1", model_type="t2v", dim=256, num_heads=2, ffn_dim=512, num_layers=4, in_dim=16, out_dim=16,
    patch_size=(1, 2, 2), freq_dim=256, window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6,
)  # fmt: skip
QWEN_IMAGE = dict(
    image_model="qwen_image", in_channels=64, out_channels=16, num_layers=4, num_attention_heads=2, attention_head_dim=128,
    joint_attention_dim=64,
)  # fmt: skip
Z_IMAGE = dict(
    image_model="lumina2", patch_size=2, in_channels=16, dim=256, n_layers=4, n_refiner_layers=2, n_heads=2, n_kv_heads=2,
    cap_feat_dim=64, qk_norm=True, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0,
    ffn_dim_multiplier=8.0 / 3.0, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
)  # fmt: skip
SD3 = dict(
    in_channels=16, out_channels=16, patch_size=2, depth=4, input_size=None, adm_in_channels=64, qk_norm="rms",
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 256}}, num_patches=1024,
    pos_embed_max_size=32, pos_embed_scaling_factor=None,
)  # fmt: skip
SDXL = dict(
    image_size=32, in_channels=4, out_channels=4, model_channels=64, num_res_blocks=[1, 1, 1], channel_mult=[1, 2, 4],
    transformer_depth=[0, 1, 2], transformer_depth_middle=2, transformer_depth_output=[0, 0, 1, 1, 2, 2], context_dim=64,
    num_head_channels=32, adm_in_channels=2816, num_classes="sequential", legacy=False, use_spatial_transformer=True,
    use_linear_in_transformer=True, use_temporal_attention=False, use_temporal_resblock=False,
)  # fmt: skip
VAE = dict(
    double_z=True, z_channels=16, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 2, 4, 4], num_res_blocks=2,
    attn_resolutions=[], dropout=0.0,
)  # fmt: skip

# name -> (the host's class, its configuration, width of the text, width of the pooled text or None, other conditioning)
MODELS = dict(
    flux=(comfy.supported_models.Flux, FLUX, 768, 768, {"guidance": 3.5}),
    wan=(comfy.supported_models.WAN21_T2V, WAN, 4096, None, {}),
    qwen_image=(comfy.supported_models.QwenImage, QWEN_IMAGE, 64, None, {}),
    z_image=(comfy.supported_models.ZImage, Z_IMAGE, 64, None, {}), sd3=(comfy.supported_models.SD3, SD3, 64, 64, {}),
    sdxl=(comfy.supported_models.SDXL, SDXL, 64, 1280, {}),
)  # fmt: skip


@torch.no_grad()
def _randomise(module, seed, std=0.05):
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        tensor.requires_grad_(False)
        # Norm weights stay near one, or the signal dies within a few blocks.
        mean = 1.0 if tensor.dim() == 1 and name.endswith(("weight", "scale")) else 0.0
        noise = torch.randn(tensor.shape, generator=generator) * std + mean
        tensor.copy_(noise)
    return module.eval()


def _diffusion_model(name, device, dtype=torch.float32):
    host_class, config, *_ = MODELS[name]
    model_config = host_class(dict(config))
    model_config.set_inference_dtype(dtype, None)
    model = model_config.get_model({}, "", device=device)
    _randomise(model.diffusion_model, seed=list(MODELS).index(name))
    return model.to(device)


def build_patcher(name, device=None):
    """A ModelPatcher around the tiny model called `name`, fp32, on the device on which ComfyUI would sample."""
    device = device or comfy.model_management.get_torch_device()
    model = _diffusion_model(name, device)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def conditioning(name, tokens=24, seed=0):
    """(positive, negative) as CLIPTextEncode would hand them to a sampler."""
    _, _, width, pooled, other = MODELS[name]
    generator = torch.Generator().manual_seed(1000 + seed)

    def one():
        options = dict(other)
        if pooled:
            options["pooled_output"] = torch.randn(1, pooled, generator=generator)
        return [[torch.randn(1, tokens, width, generator=generator), options]]

    return one(), one()


def empty_latent(name, width=64, height=64, length=1, batch_size=1):
    """The samples of an empty LATENT, in the shape that ComfyUI's Empty...Latent node for that model makes."""
    channels = 4 if name == "sdxl" else 16
    size = [batch_size, channels, height // 8, width // 8]
    if name in ("wan", "qwen_image"):
        size.insert(2, (length - 1) // 4 + 1)
    return torch.zeros(size)


def _save(state_dict, path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({key: value.contiguous() for key, value in state_dict.items()}, str(path))
    return path


def write_flux(path):
    return _save(_diffusion_model("flux", torch.device("cpu")).diffusion_model.state_dict(), path)


def write_wan(path):
    return _save(_diffusion_model("wan", torch.device("cpu")).diffusion_model.state_dict(), path)


def write_clip_l(path):
    """CLIP-L at full size, the only size that ComfyUI's loader knows; half precision keeps the file at 250 MB."""
    config = json.loads((Path(comfy.ops.__file__).parent / "sd1_clip_config.json").read_text())
    clip = comfy.clip_model.CLIPTextModel(config, torch.float16, torch.device("cpu"), comfy.ops.manual_cast)
    return _save(_randomise(clip, seed=100, std=0.02).state_dict(), path)


def write_flux_vae(path):
    """An autoencoder with a narrow decoder: ComfyUI reads the decoder's width from the file, but not the encoder's."""
    vae = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": VAE},
        decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": {**VAE, "ch": 32}},
    )
    return _save(_randomise(vae, seed=101).half().state_dict(), path)
