"""Make models of real size with random weights, their conditioning and latents; checkpoints.py writes the files.

session_nodes.py loads this file by its path, outside the package, so nothing of the package is imported at the top.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import torch

LORA_RANK = 16
# Double blocks of Flux' ControlNet, as many as InstantX' and Shakker's; a UNet's ControlNet is as large as its first half.
CONTROL_DEPTH = 5
# Configurations of ComfyUI's autoencoders, for images and for Wan's videos.
VAE = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
WAN_VAE = {
    "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model as the host's loader would make it.

    Args:
        config: the host's unet_config of the real model.
        dtype: weights and compute.
        size: width, height, frames.
        cfg: 1.0 runs the model once a step.
        text: shape of one prompt's conditioning.
        extra: other conditioning; a tuple is the shape of a tensor.
        family: the model's class in comfy.supported_models, for a config that ComfyUI's detection does not know.
    """

    config: dict
    dtype: torch.dtype
    size: tuple[int, int, int]
    cfg: float
    text: tuple[int, int, int]
    extra: dict = field(default_factory=dict)
    channels: int = 16
    video: bool = False
    family: str | None = None

    def host_config(self):
        """ComfyUI's configuration object, whose `get_model` makes the model."""
        import comfy.model_detection
        import comfy.supported_models

        if self.family:
            found = getattr(comfy.supported_models, self.family)(dict(self.config))
        else:
            found = comfy.model_detection.model_config_from_unet_config(self.config)
        found.set_inference_dtype(self.dtype, None)
        return found


_SD = dict(
    image_size=32, use_spatial_transformer=True, legacy=False, in_channels=4, out_channels=4, model_channels=320,
    use_temporal_attention=False, use_temporal_resblock=False,
)  # fmt: skip
MODELS = {
    "flux": Model(
        dict(
            image_model="flux", in_channels=16, patch_size=2, out_channels=16, vec_in_dim=768, context_in_dim=4096,
            hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56],
            theta=10000, qkv_bias=True, guidance_embed=True, txt_ids_dims=[], yak_mlp=False, txt_norm=False,
        ),
        torch.bfloat16, (1024, 1024, 1), 1.0, (1, 512, 4096), {"pooled_output": (1, 768), "guidance": 3.5},
    ),
    "klein": Model(
        dict(
            image_model="flux2", in_channels=128, patch_size=1, out_channels=128, vec_in_dim=None, context_in_dim=7680,
            hidden_size=3072, mlp_ratio=3.0, num_heads=24, depth=5, depth_single_blocks=20, axes_dim=[32, 32, 32, 32],
            theta=2000, qkv_bias=False, ops_bias=False, guidance_embed=False, global_modulation=True, mlp_silu_act=True,
            default_ref_method="index", ref_index_scale=10.0, txt_ids_dims=[3], yak_mlp=False, txt_norm=False,
        ),
        torch.bfloat16, (1024, 1024, 1), 1.0, (1, 512, 7680), channels=128,
    ),
    "qwen_image": Model(
        dict(image_model="qwen_image", in_channels=64, out_channels=16, num_layers=60),
        torch.bfloat16, (1328, 1328, 1), 1.0, (1, 128, 3584), video=True,
    ),
    "wan14": Model(
        dict(
            image_model="wan2.1", dim=5120, num_heads=40, ffn_dim=13824, num_layers=40, patch_size=(1, 2, 2), freq_dim=256,
            window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6, in_dim=16, out_dim=16, model_type="t2v",
        ),
        torch.bfloat16, (832, 480, 33), 1.0, (1, 512, 4096), video=True,
    ),
    "z_image": Model(
        dict(
            image_model="lumina2", patch_size=2, in_channels=16, dim=3840, n_layers=30, n_refiner_layers=2, n_heads=30,
            n_kv_heads=30, cap_feat_dim=2560, qk_norm=True, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512],
            rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0, z_image_modulation=True, time_scale=1000.0,
            pad_tokens_multiple=32,
        ),
        torch.bfloat16, (1024, 1024, 1), 1.0, (1, 128, 2560),
    ),
    "sdxl": Model(
        dict(
            _SD, num_classes="sequential", adm_in_channels=2816, num_res_blocks=[2, 2, 2],
            transformer_depth=[0, 0, 2, 2, 10, 10], channel_mult=[1, 2, 4], transformer_depth_middle=10,
            use_linear_in_transformer=True, context_dim=2048, num_head_channels=64,
            transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
        ),
        torch.float16, (1024, 1024, 1), 5.0, (1, 77, 2048), {"pooled_output": (1, 1280)}, channels=4,
    ),
    "sd15": Model(
        dict(
            _SD, adm_in_channels=None, num_res_blocks=[2, 2, 2, 2], transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
            channel_mult=[1, 2, 4, 4], transformer_depth_middle=1, use_linear_in_transformer=False, context_dim=768,
            num_heads=8, num_head_channels=-1, transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        ),
        torch.float16, (512, 512, 1), 5.0, (1, 77, 768), channels=4,
    ),
}  # fmt: skip
# Real widths with few blocks, so a session takes a minute. The UNet is Segmind Vega's, which ComfyUI's loader knows.
MODELS["flux_wide"] = replace(MODELS["flux"], config=dict(MODELS["flux"].config, depth=4, depth_single_blocks=8))
MODELS["sdxl_wide"] = replace(
    MODELS["sdxl"],
    config=dict(
        MODELS["sdxl"].config, transformer_depth=[0, 0, 1, 1, 2, 2], transformer_depth_middle=-1,
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 2, 2, 2],
    ),
)  # fmt: skip
# Small enough for two cores of a CPU.
MODELS["flux_small"] = Model(
    dict(
        MODELS["flux"].config, vec_in_dim=256, context_in_dim=256, hidden_size=512, num_heads=4, depth=2, depth_single_blocks=2,
    ),
    torch.float32, (256, 256, 1), 1.0, (1, 64, 256), {"pooled_output": (1, 256), "guidance": 3.5},
)  # fmt: skip
MODELS["sdxl_small"] = Model(
    dict(
        MODELS["sdxl"].config, model_channels=128, num_res_blocks=[1, 1], channel_mult=[1, 2],
        transformer_depth=[0, 1], transformer_depth_middle=1, transformer_depth_output=[0, 0, 1, 1], context_dim=64,
    ),
    torch.float32, (256, 256, 1), 5.0, (1, 77, 64), {"pooled_output": (1, 1280)}, channels=4, family="SDXL",
)  # fmt: skip
MODELS["sd15_small"] = Model(
    dict(
        MODELS["sd15"].config, model_channels=128, num_res_blocks=[1, 1], channel_mult=[1, 2], transformer_depth=[1, 1],
        transformer_depth_middle=1, transformer_depth_output=[1, 1, 1, 1], context_dim=64,
    ),
    torch.float32, (256, 256, 1), 5.0, (1, 77, 64), channels=4, family="SD15",
)  # fmt: skip
MODELS["wan_small"] = Model(
    dict(MODELS["wan14"].config, dim=256, num_heads=2, ffn_dim=512, num_layers=2),
    torch.float32, (128, 128, 5), 1.0, (1, 64, 4096), video=True,
)  # fmt: skip
# A third of the depth, since several servers hold weights at once: a step of the full model takes three times as long. Both
# models of the pair share a file.
MODELS["wan22"] = replace(MODELS["wan14"], config=dict(MODELS["wan14"].config, num_layers=12), size=(832, 480, 81))
MODELS["wan14_small"] = MODELS["wan22_small"] = MODELS["wan_small"]
MODELS["qwen_edit"] = replace(
    MODELS["qwen_image"], config=dict(MODELS["qwen_image"].config, num_layers=20), size=(1024, 1024, 1), text=(1, 512, 3584)
)
MODELS["qwen_edit_small"] = replace(
    MODELS["qwen_edit"], config=dict(MODELS["qwen_image"].config, num_layers=1), dtype=torch.float32, size=(128, 128, 1),
    text=(1, 64, 3584),
)  # fmt: skip
MODELS["klein_small"] = replace(
    MODELS["klein"],
    config=dict(MODELS["klein"].config, context_in_dim=256, hidden_size=512, num_heads=4, depth=2, depth_single_blocks=2),
    dtype=torch.float32, size=(256, 256, 1), text=(1, 64, 256),
)  # fmt: skip
MODELS["z_image_small"] = replace(
    MODELS["z_image"],
    config=dict(
        MODELS["z_image"].config, dim=256, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=64,
    ),
    dtype=torch.float32, size=(256, 256, 1), text=(1, 64, 64), family="ZImage",
)  # fmt: skip


def weights(name: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of a model on `device`: random weights, the same for the same name."""
    model = MODELS[name]
    shapes = model.host_config().get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    generator = torch.Generator(device=device).manual_seed(1)
    for key, shape in shapes.items():
        yield key, random_weight(key, shape.shape, model.dtype, device, generator)


def build(name: str, device: torch.device):
    """A patcher whose weights are on `device` from the start."""
    import comfy.model_patcher

    config = MODELS[name].host_config()
    with torch.device(device):
        base_model = config.get_model({}, "", device=device)
        generator = torch.Generator(device=device).manual_seed(1)
        for key, parameter in base_model.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = random_weight(key, parameter.shape, parameter.dtype, device, generator)
    base_model.to(device).eval()
    return comfy.model_patcher.ModelPatcher(base_model, load_device=device, offload_device=torch.device("cpu"))


def build_control(name: str):
    """A ControlNet for a model, as the host's loader makes it (comfy/controlnet.py), with random weights."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.latent_formats
    import comfy.ldm.flux.controlnet
    import comfy.memory_management
    import comfy.model_management as management
    import comfy.ops

    config, dtype, device = MODELS[name].config, MODELS[name].dtype, management.get_torch_device()
    cast = management.unet_manual_cast(dtype, device)
    layers = {"operations": comfy.ops.pick_operations(dtype, cast), "dtype": dtype, "device": management.unet_offload_device()}
    about = {"load_device": device, "manual_cast_dtype": cast}
    # Under dynamic VRAM the host's layers have no weights before a file is loaded.
    with mock.patch.object(comfy.memory_management, "aimdo_enabled", False):
        if config.get("image_model") == "flux":
            config = {**config, "depth": min(CONTROL_DEPTH, config["depth"]), "depth_single_blocks": 0}
            network = comfy.ldm.flux.controlnet.ControlNetFlux(latent_input=True, **config, **layers)
            latents = comfy.latent_formats.Flux()
            about |= {"compression_ratio": 1, "latent_format": latents, "extra_conds": ["y", "guidance"]}
        else:
            left_out = ("out_channels", "transformer_depth_output")
            config = {key: value for key, value in config.items() if key not in left_out}
            network = comfy.cldm.cldm.ControlNet(hint_channels=3, **config, **layers)
    generator = torch.Generator(device=device).manual_seed(4)
    for key, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = random_weight(key, parameter.shape, dtype, device, generator).to(parameter.device)
    return comfy.controlnet.ControlNet(network, **about)


def latent(name: str, seed: int, batch: int) -> torch.Tensor:
    """Random latents of the model's size."""
    model = MODELS[name]
    width, height = (side // (16 if model.channels == 128 else 8) for side in model.size[:2])
    frames = [(model.size[2] - 1) // 4 + 1] if model.video else []
    shape = [batch, model.channels, *frames, height, width]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(key: str, shape, dtype, device, generator) -> torch.Tensor:
    """One weight: small random matrices, norms of one, biases of zero."""
    if len(shape) >= 2:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    if key.endswith(("scale", "weight")):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def conditioning(name: str, tokens: int, negative_tokens: int):
    """(positive, negative) in the model's real shapes, `tokens` and `negative_tokens` long."""
    model = MODELS[name]
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    batch, _, width = model.text
    text = random(batch, tokens, width)
    extra = {key: random(*value) if isinstance(value, tuple) else value for key, value in model.extra.items()}
    negative = -text if negative_tokens == tokens else random(batch, negative_tokens, width)
    return [[text, extra]], [[negative, dict(extra)]]


def lora_weights(network, seed: int) -> dict[str, torch.Tensor]:
    """Random LoRA for every matrix of the blocks, as a trainer saves it."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in network.named_parameters():
        if name.endswith(".weight") and weight.dim() == 2 and any(part in name for part in ("blocks", "layers")):
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            weights[f"{layer}.lora_A.weight"] = torch.randn(LORA_RANK, columns, generator=generator).bfloat16() / 64
            weights[f"{layer}.lora_B.weight"] = torch.randn(rows, LORA_RANK, generator=generator).bfloat16() / 64
    return weights


def vae_class(name: str):
    """The autoencoder that comfy.sd.VAE makes for the model's VAE file; small models get a narrow decoder."""
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
    from comfy.ldm.wan.vae import WanVAE

    small = name.endswith("_small")
    if MODELS[name].video:
        return WanVAE(**{**WAN_VAE, "dim": 16 if small else WAN_VAE["dim"]})
    if MODELS[name].channels == 128:  # Flux 2: a position of the latent packs 2x2 positions of the VAE
        size = {**VAE, "z_channels": 32, "batch_norm_latent": True}
        return AutoencoderKL(ddconfig=size, embed_dim=32, decoder_ddconfig={**size, "ch": 32 if small else size["ch"]})
    size = {**VAE, "z_channels": MODELS[name].channels}
    part = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{part}.Encoder", "params": size},
        decoder_config={"target": f"{part}.Decoder", "params": {**size, "ch": 32 if small else size["ch"]}},
    )


def vae_weights(make_network, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights, in RAM, for the network that `make_network` makes."""
    with torch.device("meta"):
        shapes = make_network().state_dict()
    generator = torch.Generator(device=device).manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {key: random_weight(key, s.shape, dtype, device, generator).cpu() for key, s in shapes.items()}
