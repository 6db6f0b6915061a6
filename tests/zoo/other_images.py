"""The newer image transformers: OmniGen 2, HiDream, Krea 2, Ideogram 4, PixelDiT and others."""

import torch

from .builders import Setup, sizes
from .flux_family import prompt_mask
from .image_family import PIXELS, SMALL, SPANS, edited

PATCHED = sizes(16, *SPANS)

OMNIGEN2 = dict(
    image_model="omnigen2", axes_dim_rope=[16, 24, 24], axes_lens=[1024, 1664, 1664], hidden_size=128, ffn_dim_multiplier=None,
    in_channels=16, multiple_of=32, norm_eps=1e-05, num_attention_heads=2, num_kv_heads=1, num_layers=3, num_refiner_layers=2,
    out_channels=None, patch_size=2, text_feat_dim=64, timestep_scale=1000.0,
)  # fmt: skip
BOOGU = dict(
    image_model="boogu", hidden_size=128, num_layers=3, num_double_stream_layers=3, multiple_of=32, num_refiner_layers=2,
    instruction_feat_dim=64, num_attention_heads=2, num_kv_heads=1, axes_dim_rope=(16, 24, 24),
)  # fmt: skip
HIDREAM = dict(
    image_model="hidream", attention_head_dim=64, axes_dims_rope=[32, 16, 16], caption_channels=[64, 64],
    max_resolution=[32, 32], in_channels=16, llama_layers=[0, 1, 2, 3, 3, 3], num_attention_heads=2, num_routed_experts=4,
    num_activated_experts=2, num_layers=3, num_single_layers=3, out_channels=16, patch_size=2, text_emb_dim=64,
)  # fmt: skip
# Its tokens reach far into the vocabulary, so the table of tokens is most of the model.
HIDREAM_O1 = dict(
    image_model="hidream_o1",
    text_config_overrides=dict(
        hidden_size=48, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        rope_dims=[4, 6, 6],
    ),
    vision_config_overrides=dict(
        hidden_size=64, intermediate_size=128, depth=2, num_heads=2, num_position_embeddings=64, deepstack_visual_indexes=[],
    ),
)  # fmt: skip
KREA2 = dict(
    image_model="krea2", features=128, channels=16, patch=2, layers=3, heads=2, kvheads=1, txtlayers=3, txtdim=64, txtheads=2,
    txtkvheads=2,
)  # fmt: skip
IDEOGRAM4 = dict(
    image_model="ideogram4", in_channels=128, num_layers=3, num_attention_heads=2, attention_head_dim=64, intermediate_size=256,
    adaln_dim=64, llm_features_dim=64, mrope_section=(8, 12, 12),
)  # fmt: skip
ERNIE = dict(
    image_model="ernie", hidden_size=128, num_attention_heads=2, num_layers=3, ffn_hidden_size=256, text_in_dim=64,
    rope_axes_dim=(16, 24, 24),
)  # fmt: skip
JOYIMAGE = dict(
    image_model="joyimage", in_channels=16, hidden_size=128, patch_size=[1, 2, 2], num_layers=3, num_attention_heads=2,
    text_dim=64, rope_dim_list=[16, 24, 24],
)  # fmt: skip
PIXELDIT = dict(
    image_model="pixeldit_t2i", hidden_size=128, num_groups=2, pixel_hidden_size=8, pixel_attn_hidden_size=64,
    pixel_num_groups=2, patch_depth=3, pixel_depth=2, patch_size=16, txt_embed_dim=64, txt_max_length=32,
)  # fmt: skip
PID = dict(
    PIXELDIT, image_model="pid", lq_hidden_dim=32, lq_num_res_blocks=2, lq_interval=2, lq_latent_channels=16,
    latent_spatial_down_factor=8,
)  # fmt: skip
PID15 = dict(
    PID, lq_conv_padding_mode="replicate", lq_gate_per_token=True, pit_lq_inject=True, rope_ref_h=2048, rope_ref_w=2048
)


def no_padding(draw, shape, tokens):
    return {"attention_mask": torch.ones(1, tokens, dtype=torch.long)}


def unpadded_edit(draw, shape, tokens):
    return no_padding(draw, shape, tokens) | edited(16, (16, 16))(draw, shape, tokens)


def llama(draw, shape, tokens):
    return {"conditioning_llama3": draw(1, 4, tokens, 64)}


def llama_edit(draw, shape, tokens):
    return llama(draw, shape, tokens) | {"concat_latent_image": draw(1, *shape)}


def token_ids(draw, shape, tokens):
    ids = draw.ids(1, tokens, below=1000)
    ids[:, -1] = 151673  # where the timestep goes in
    return {"text_input_ids": ids}


def with_image(draw, shape, tokens):
    return token_ids(draw, shape, tokens) | {"reference_latents": [draw(1, 64, 64, 3).abs()]}


def low_resolution(draw, shape, tokens):
    """What is made four times as large, in latents of an eighth."""
    return {"lq_latent": draw(1, 16, shape[1] // 32, shape[2] // 32), "degrade_sigma": torch.tensor([0.3])}


SETUPS = [
    Setup("omnigen2", "Omnigen2", OMNIGEN2, PATCHED, 64, None, no_padding),
    Setup("omnigen2_edit", "Omnigen2", OMNIGEN2, PATCHED, 64, None, unpadded_edit),
    Setup("boogu", "Boogu", BOOGU, PATCHED, 64, None, no_padding),
    Setup("boogu_edit", "Boogu", BOOGU, PATCHED, 64, None, unpadded_edit),
    Setup("hidream_i1", "HiDream", HIDREAM, PATCHED, 64, 64, llama),
    Setup("hidream_e1", "HiDream", HIDREAM, PATCHED, 64, 64, llama_edit),
    Setup("hidream_o1", "HiDreamO1", HIDREAM_O1, sizes(3, (128, 128), (192, 128), (256, 192)), None, None, token_ids),
    Setup("hidream_o1_edit", "HiDreamO1", HIDREAM_O1, sizes(3, (128, 128), (192, 128), (256, 192)), None, None, with_image),
    Setup("krea2", "Krea2", KREA2, PATCHED, 192),
    Setup("krea2_edit", "Krea2", KREA2, PATCHED, 192, None, edited(16, (16, 16), method="index_timestep_zero")),
    Setup("ideogram4", "Ideogram4", IDEOGRAM4, sizes(128, *SMALL), 64),
    Setup("ideogram4_mask", "Ideogram4", IDEOGRAM4, sizes(128, *SMALL), 64, None, prompt_mask),
    Setup("ernie", "ErnieImage", ERNIE, sizes(128, *SMALL), 64),
    Setup("joyimage", "JoyImage", JOYIMAGE, sizes(16, *((1, *span) for span in SPANS)), 64),
    Setup("joyimage_edit", "JoyImage", JOYIMAGE, sizes(16, *((1, *span) for span in SPANS)), 64, None, edited(16, (1, 16, 16))),
    Setup("pixeldit", "PixelDiTT2I", PIXELDIT, PIXELS, 64),
    Setup("pid", "PiD", PID, PIXELS, 64, None, low_resolution),
    Setup("pid15", "PiD", PID15, PIXELS, 64, None, low_resolution),
]
