"""Video transformers but for Wan and Hunyuan: LTX, Cosmos, Mochi, CogVideoX, Kandinsky, SeedVR2, MiniMax."""

import comfy.ldm.anima.model
import comfy.ops
import torch

from .builders import Setup, sizes

SPANS = ((3, 8, 8), (3, 12, 8), (5, 12, 12))
SMALL = ((3, 4, 4), (3, 6, 4), (5, 8, 6))
VIDEO = sizes(16, *SPANS)
IMAGE = sizes(16, (1, 8, 8), (1, 12, 8), (1, 16, 12))

LTXV = dict(
    image_model="ltxv", num_layers=3, attention_head_dim=64, num_attention_heads=2, cross_attention_dim=128, caption_channels=64
)
LTXAV = dict(
    LTXV, image_model="ltxav", audio_attention_head_dim=32, audio_num_attention_heads=2, audio_cross_attention_dim=64,
    connector_attention_head_dim=32, connector_num_attention_heads=2, connector_num_layers=2,
)  # fmt: skip
LTXAV23 = dict(
    LTXAV, apply_gated_attention=True, connector_apply_gated_attention=True, cross_attention_adaln=True,
    caption_proj_before_connector=True, connector_attention_head_dim=64, audio_connector_attention_head_dim=32,
)  # fmt: skip
# Video, and sound of 8 channels and 16 bands.
SOUND = tuple([(128, *span), (8, length, 16)] for span, length in zip(SMALL, (9, 12, 20), strict=True))
COSMOS = dict(
    image_model="cosmos", max_img_h=48, max_img_w=48, max_frames=16, in_channels=16, out_channels=16, patch_spatial=2,
    patch_temporal=1, model_channels=128, concat_padding_mask=True, num_blocks=3, num_heads=2, crossattn_emb_channels=64,
    pos_emb_cls="rope3d", pos_emb_learnable=False, pos_emb_interpolation="crop", use_adaln_lora=True, adaln_lora_dim=32,
    extra_per_block_abs_pos_emb=True, rope_h_extrapolation_ratio=1.0, rope_w_extrapolation_ratio=1.0,
    rope_t_extrapolation_ratio=2.0,
)  # fmt: skip
COSMOS1 = dict(
    COSMOS, block_config="FA-CA-MLP", block_x_format="THWBD", affline_emb_norm=True,
    extra_per_block_abs_pos_emb_type="learnable",
)  # fmt: skip
PREDICT2 = dict(
    COSMOS, image_model="cosmos_predict2", pos_emb_learnable=True, min_fps=1, max_fps=30, extra_per_block_abs_pos_emb=False,
    rope_enable_fps_modulation=False,
)  # fmt: skip
ANIMA = PREDICT2 | {"image_model": "anima"}
# The host insists on the real width of the feed-forward part of the video, 12288.
MOCHI = dict(
    image_model="mochi_preview", depth=3, patch_size=2, num_heads=2, hidden_size_x=64, hidden_size_y=32, mlp_ratio_x=192.0,
    mlp_ratio_y=4.0, learn_sigma=False, in_channels=12, qk_norm=True, qkv_bias=False, out_bias=True, attn_drop=0.0,
    patch_embed_bias=True, posenc_preserve_area=True, timestep_mlp_bias=True, attend_to_padding=False, timestep_scale=1000.0,
    use_t5=True, t5_feat_dim=64, t5_token_length=16, rope_theta=10000.0,
)  # fmt: skip
COG = dict(
    image_model="cogvideox", num_attention_heads=2, attention_head_dim=64, time_embed_dim=64, num_layers=3, in_channels=16,
    patch_size=2, text_embed_dim=64, max_text_seq_length=12, sample_width=12, sample_height=12, sample_frames=17,
)  # fmt: skip
# Tables of positions go by thirds of the width.
COG_TABLE = COG | {"num_attention_heads": 3}
COG_I2V = dict(COG_TABLE, in_channels=32, use_learned_positional_embeddings=True, use_rotary_positional_embeddings=True)
I2V = sizes(16, (5, 12, 12), (5, 8, 12), (5, 12, 8))
COG_ROTARY = dict(COG, use_rotary_positional_embeddings=True)
COG15 = dict(COG_ROTARY, in_channels=32, patch_size_t=2, ofs_embed_dim=64)
I2V15 = sizes(16, (4, 8, 8), (4, 12, 8), (6, 12, 12))
COG_INPAINT = dict(COG_ROTARY, in_channels=48)
KANDINSKY5 = dict(
    image_model="kandinsky5", model_dim=128, axes_dims=(16, 24, 24), time_dim=64, ff_dim=256, visual_embed_dim=132,
    num_text_blocks=2, num_visual_blocks=3, in_text_dim=64, in_text_dim2=64,
)  # fmt: skip
KANDINSKY5_IMAGE = dict(KANDINSKY5, visual_embed_dim=64, rope_scale_factor=(1.0, 1.0, 1.0))
SEEDVR2 = dict(
    image_model="seedvr2", vid_dim=128, heads=2, head_dim=64, rope_dim=64, num_layers=6, mm_layers=3, norm_eps=1e-5,
    mlp_type="swiglu", vid_out_norm=True, txt_in_dim=64,
)  # fmt: skip
MINIMAX = dict(
    image_model="minimax_h3", num_layers=3, token_refiner_num_layers=2, hidden_size=128, num_attention_heads=2,
    attention_head_dim=64, ffn_hidden_size=256, latents_dim=24, audio_latents_dim=32, text_dim=64, timestep_input_dim=256,
    time_embed_hidden_size=128, time_embed_dim=64, rope_inv_freq_len=8,
)  # fmt: skip
FILM = tuple([(24, *span), (32, 2, length)] for span, length in zip(SPANS, (6, 6, 10), strict=True))


def prompt_mask(draw, shape, tokens):
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, : tokens // 4] = 0
    return {"attention_mask": mask}


def t5_mask(draw, shape, tokens):
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, -tokens // 4 :] = 0
    return {"attention_mask": mask}


def first_frame(draw, shape, tokens):
    """The first frame is given: each token then has its own timestep."""
    mask = torch.ones(1, 1, *shape[1:])
    mask[:, :, 0] = 0
    return {"denoise_mask": mask}


def ltx_first_frame(draw, shape, tokens):
    return prompt_mask(draw, shape, tokens) | first_frame(draw, shape, tokens)


def t5_ids(draw, shape, tokens):
    return {"t5xxl_ids": draw.ids(tokens, below=32000), "t5xxl_weights": torch.ones(tokens)}


def small_adapter(model):
    """The host fixes the width of this part, which comes before the blocks, at 130M parameters."""
    model.diffusion_model.llm_adapter = comfy.ldm.anima.model.LLMAdapter(
        source_dim=64, target_dim=64, model_dim=64, num_layers=2, num_heads=2, operations=comfy.ops.disable_weight_init
    )


def concat(channels):
    def extras(draw, shape, tokens):
        return {"concat_latent_image": draw(1, channels, *shape[1:])}

    return extras


def first_latent(draw, shape, tokens):
    return {"time_dim_replace": draw(1, 16, 1, *shape[2:])}


def restore(draw, shape, tokens):
    return {"condition": draw(1, shape[0] + 1, *shape[1:])}


def keyframe(draw, shape, tokens):
    video = shape[0]
    return {"minimax_keyframes": [{"resolved_frame_index": 0, "latent": draw(1, 24, 1, *video[2:])}], "minimax_frame_count": 9}


def frequencies(model, draw):
    """A checkpoint brings this buffer along."""
    table = model.diffusion_model.rope.inv_freq
    table.copy_(10000.0 ** -(torch.arange(len(table)) / len(table)))


SETUPS = [
    Setup("ltxv", "LTXV", LTXV, sizes(128, *SMALL), 64, None, prompt_mask),
    Setup("ltxv_i2v", "LTXV", LTXV, sizes(128, *SMALL), 64, None, ltx_first_frame),
    Setup("ltxav", "LTXAV", LTXAV, SOUND, 128, None, prompt_mask),
    # Text as the encoder leaves it: the connectors run once, before the sampling.
    Setup("ltxav_connectors", "LTXAV", LTXAV, SOUND, 64),
    Setup("ltxav_23", "LTXAV", LTXAV23, SOUND, 192),
    Setup("cosmos1_t2v", "CosmosT2V", COSMOS1, VIDEO, 64),
    Setup("cosmos1_i2v", "CosmosI2V", COSMOS1 | {"in_channels": 17}, VIDEO, 64, None, first_frame),
    Setup("cosmos_predict2", "CosmosT2IPredict2", PREDICT2, VIDEO, 64),
    Setup("cosmos_predict2_i2v", "CosmosI2VPredict2", PREDICT2 | {"in_channels": 17}, VIDEO, 64, None, first_frame),
    Setup("anima", "Anima", ANIMA, IMAGE, 64, None, t5_ids, amend=small_adapter),
    Setup("anima_extra_blocks", "Anima", ANIMA | {"num_blocks": 5}, IMAGE, 64, None, t5_ids, amend=small_adapter),
    Setup("mochi", "GenmoMochi", MOCHI, sizes(12, *SPANS), 64, None, t5_mask, tokens=16),
    Setup("cogvideox_2b", "CogVideoX_T2V", COG_TABLE, VIDEO, 64, fixed_tokens=True),
    Setup("cogvideox_5b", "CogVideoX_T2V", COG_ROTARY, VIDEO, 64, fixed_tokens=True),
    Setup("cogvideox_i2v", "CogVideoX_I2V", COG_I2V, I2V, 64, None, concat(16), fixed_tokens=True),
    Setup("cogvideox15_i2v", "CogVideoX_I2V", COG15, I2V15, 64, None, concat(16), fixed_tokens=True),
    Setup("cogvideox_inpaint", "CogVideoX_Inpaint", COG_INPAINT, VIDEO, 64, None, concat(32), fixed_tokens=True),
    Setup("kandinsky5", "Kandinsky5", KANDINSKY5, VIDEO, 64, 64),
    Setup("kandinsky5_i2v", "Kandinsky5", KANDINSKY5, VIDEO, 64, 64, first_latent),
    Setup("kandinsky5_image", "Kandinsky5Image", KANDINSKY5_IMAGE, IMAGE, 64, 64),
    Setup("seedvr2", "SeedVR2", SEEDVR2, VIDEO, 64, None, restore),
    Setup("minimax_h3", "MiniMaxH3", MINIMAX, FILM, 64, finish=frequencies, max_batch=1),
    Setup("minimax_h3_keyframe", "MiniMaxH3", MINIMAX, FILM, 64, None, keyframe, finish=frequencies, max_batch=1),
]
