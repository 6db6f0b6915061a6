"""Image transformers: Stable Diffusion 3, AuraFlow, PixArt, Hunyuan DiT, Qwen-Image, Lumina 2 and their kin."""

import torch

from .builders import Setup, sizes
from .flux_family import prompt_mask, references

SPANS = ((16, 16), (24, 16), (32, 24))
SMALL = ((8, 8), (12, 8), (16, 12))
PATCHED = sizes(16, *SPANS)
FOUR = sizes(4, *SPANS)
# Models that also take video see an image as one frame.
ONE_FRAME = sizes(16, *((1, *span) for span in SPANS))

SD3 = dict(
    in_channels=16, out_channels=16, patch_size=2, depth=2, num_blocks=4, input_size=None, adm_in_channels=64, num_patches=1024,
    pos_embed_max_size=32, pos_embed_scaling_factor=None,
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}},
    x_block_self_attn_layers=[],
)  # fmt: skip
AURAFLOW = dict(max_seq=1024, cond_seq_dim=64, n_double_layers=3, n_layers=6, dim=128, n_heads=2, global_conddim=128)
PIXART = dict(
    image_model="pixart_alpha", num_heads=3, patch_size=2, hidden_size=192, in_channels=4, depth=3, model_max_length=12,
    input_size=32, pe_interpolation=1, micro_condition=True, caption_channels=64,
)  # fmt: skip
HYDIT = dict(
    image_model="hydit", depth=6, hidden_size=128, num_heads=2, mlp_ratio=4.0, text_states_dim=64, text_states_dim_t5=64
)
HYDIT1 = dict(HYDIT, image_model="hydit1", size_cond=True, use_style_cond=True)
QWEN = dict(
    image_model="qwen_image", in_channels=64, num_layers=3, num_attention_heads=2, attention_head_dim=64,
    axes_dims_rope=(16, 24, 24), joint_attention_dim=64,
)  # fmt: skip
QWEN_2511 = dict(QWEN, default_ref_method="index_timestep_zero")
LAYERED = dict(QWEN, default_ref_method="negative_index", use_additional_t_cond=True)
LAYERS = sizes(16, *((3, *span) for span in SMALL))
MAGE = QWEN | {"image_model": "mage_flow", "in_channels": 128, "out_channels": 128}
LUMINA = dict(
    image_model="lumina2", patch_size=2, in_channels=16, dim=128, cap_feat_dim=64, n_layers=3, n_refiner_layers=2, qk_norm=True,
    n_heads=2, n_kv_heads=1, axes_dims=[16, 24, 24], axes_lens=[300, 512, 512], rope_theta=10000.0, ffn_dim_multiplier=4.0,
    multiple_of=32,
)  # fmt: skip
# Its modulation is 256 wide whatever the model's width.
Z_IMAGE = dict(
    LUMINA, dim=256, axes_dims=[32, 48, 48], n_kv_heads=2, rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0,
    z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
)  # fmt: skip
Z_PIXEL = dict(
    Z_IMAGE, image_model="zimage_pixel", patch_size=8, in_channels=3, decoder_in_channels=192, decoder_hidden_size=64,
    decoder_num_res_blocks=3, decoder_max_freqs=4, use_x0=True,
)  # fmt: skip
# PixArt scales its positions by the nearest multiple of 64, which must not be none.
LARGE = sizes(4, (40, 40), (48, 40), (64, 48))
PIXELS = sizes(3, (64, 64), (96, 64), (128, 96))


def square(draw, shape, tokens):
    return {"width": shape[2] * 8, "height": shape[1] * 8}


def hydit(draw, shape, tokens):
    clip, t5 = torch.ones(1, tokens), torch.ones(1, 256)
    clip[:, tokens // 2 :] = 0
    t5[:, 100:] = 0
    return {"attention_mask": clip, "conditioning_mt5xl": draw(1, 256, 64), "attention_mask_mt5xl": t5}


def edited(channels, *spans, method=None):
    add = references(channels, *spans, method=method)

    def extras(draw, shape, tokens):
        entries = add(draw, shape, tokens)
        entries.pop("guidance")
        return entries

    return extras


def positions(model, draw):
    """The table of positions is a buffer that the host leaves unset."""
    table = model.diffusion_model.pos_embed
    table.copy_(draw(*table.shape))


class Seen:
    """What a SigLIP model says of an image of 64 by 64."""

    def __init__(self, draw):
        self.last_hidden_state = draw(1, 16, 32)
        self.image_sizes = [(3, 64, 64)]


def omni(draw, shape, tokens):
    return {
        "reference_latents": [draw(1, 16, 8, 8)],
        "reference_latents_text_embeds": [draw(1, 5, 64)],
        "clip_vision_outputs": [Seen(draw)],
    }


SETUPS = [
    Setup("sd3", "SD3", SD3, PATCHED, 64, 64, finish=positions),
    Setup("sd35", "SD3", SD3 | {"qk_norm": "rms"}, PATCHED, 64, 64, finish=positions),
    Setup(
        "sd35_medium", "SD3", SD3 | {"qk_norm": "rms", "x_block_self_attn_layers": [0, 1]}, PATCHED, 64, 64, finish=positions
    ),
    Setup("auraflow", "AuraFlow", AURAFLOW, FOUR, 64),
    Setup("pixart_alpha", "PixArtAlpha", PIXART, LARGE, 64, None, square),
    Setup("pixart_sigma", "PixArtSigma", PIXART | {"image_model": "pixart_sigma", "micro_condition": False}, LARGE, 64),
    Setup("hunyuan_dit", "HunyuanDiT", HYDIT, FOUR, 64, None, hydit, tokens=77, fixed_tokens=True),
    Setup("hunyuan_dit1", "HunyuanDiT1", HYDIT1, FOUR, 64, None, hydit, tokens=77, fixed_tokens=True),
    Setup("qwen_image", "QwenImage", QWEN, ONE_FRAME, 64),
    Setup("qwen_image_mask", "QwenImage", QWEN, ONE_FRAME, 64, None, prompt_mask),
    Setup("qwen_image_edit", "QwenImage", QWEN, ONE_FRAME, 64, None, edited(16, (1, 16, 16), (1, 8, 12))),
    Setup("qwen_image_edit_2511", "QwenImage", QWEN_2511, ONE_FRAME, 64, None, edited(16, (1, 16, 16))),
    Setup("qwen_image_layered", "QwenImage", LAYERED, LAYERS, 64, None, edited(16, (1, 8, 8))),
    Setup("mageflow", "MageFlow", MAGE, sizes(128, *SMALL), 64),
    Setup("mageflow_edit", "MageFlow", MAGE, sizes(128, *SMALL), 64, None, edited(128, (8, 8))),
    Setup("lumina2", "Lumina2", LUMINA, PATCHED, 64, None, prompt_mask),
    Setup("newbie", "Lumina2", LUMINA | {"clip_text_dim": 64}, PATCHED, 64, 64),
    Setup("z_image", "ZImage", Z_IMAGE, PATCHED, 64),
    Setup("z_image_omni", "ZImage", Z_IMAGE | {"siglip_feat_dim": 32}, PATCHED, 64, None, omni),
    Setup("z_image_pixel", "ZImagePixelSpace", Z_PIXEL, PIXELS, 64),
]
