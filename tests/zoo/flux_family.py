"""Flux and what is built of its blocks: Flux 2, Chroma, Radiance, LongCat, Ovis, the Hunyuan models, and Lens."""

import torch

from .builders import Setup, sizes

SPANS = ((16, 16), (24, 16), (32, 24))
SMALL = ((8, 8), (12, 8), (16, 12))
VIDEO = ((3, 8, 8), (3, 12, 8), (5, 12, 12))
FRAME = ((1, 8, 8), (1, 12, 8), (1, 16, 12))
PATCHED = sizes(16, *SPANS)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


FLUX = dict(
    image_model="flux", in_channels=16, out_channels=16, patch_size=2, vec_in_dim=64, context_in_dim=64, hidden_size=128,
    mlp_ratio=4.0, num_heads=2, depth=3, depth_single_blocks=3, axes_dim=[8, 28, 28], theta=10000, qkv_bias=True,
    guidance_embed=True, txt_ids_dims=[], yak_mlp=False, txt_norm=False,
)  # fmt: skip
NO_GUIDANCE = FLUX | {"guidance_embed": False}
TEXT_ONLY = NO_GUIDANCE | {"vec_in_dim": None, "txt_ids_dims": [1, 2]}
FLUX2 = dict(
    FLUX, image_model="flux2", in_channels=128, out_channels=128, patch_size=1, axes_dim=[16, 16, 16, 16], mlp_ratio=3.0,
    theta=2000, global_modulation=True, mlp_silu_act=True, qkv_bias=False, ops_bias=False, default_ref_method="index",
    ref_index_scale=10.0, txt_ids_dims=[3], vec_in_dim=None,
)  # fmt: skip
CHROMA = dict(
    without(FLUX, 'guidance_embed', 'yak_mlp', 'txt_norm'), image_model="chroma", in_channels=64, out_channels=64, in_dim=64,
    out_dim=128, hidden_dim=128, n_layers=2, vec_in_dim=None,
)  # fmt: skip
RADIANCE = dict(
    CHROMA, image_model="chroma_radiance", in_channels=3, out_channels=3, patch_size=16, nerf_hidden_size=32, nerf_mlp_ratio=2,
    nerf_depth=3, nerf_max_freqs=8, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32,
    use_x0=True, use_sequential_txt_ids=False,
)  # fmt: skip
LINEAR = dict(RADIANCE, nerf_final_head_type="linear", use_x0=False, use_sequential_txt_ids=True, nerf_tile_size=8)
HUNYUAN = dict(
    without(FLUX, 'yak_mlp', 'txt_norm', 'txt_ids_dims'), image_model="hunyuan_video", patch_size=[1, 2, 2], theta=256,
    byt5=False, meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
)  # fmt: skip
HUNYUAN_I2V = dict(HUNYUAN, in_channels=33, guidance_embed=False)
# The mapper of the glyph encoder has 7M parameters whatever the model's width.
IMAGE21 = dict(
    HUNYUAN, in_channels=64, out_channels=64, patch_size=[1, 1], axes_dim=[32, 32], vec_in_dim=None, guidance_embed=False,
    byt5=True, depth=2, depth_single_blocks=2,
)  # fmt: skip
DISTILLED21 = dict(IMAGE21, byt5=False, meanflow=True, guidance_embed=True)
REFINER21 = dict(
    HUNYUAN, in_channels=128, out_channels=64, patch_size=[1, 1, 1], vec_in_dim=None, meanflow=True, guidance_embed=False
)
HUNYUAN15 = dict(
    HUNYUAN, in_channels=65, out_channels=32, patch_size=[1, 1, 1], vec_in_dim=None, guidance_embed=False,
    use_cond_type_embedding=True, vision_in_dim=64, meanflow_sum=True, depth_single_blocks=0,
)  # fmt: skip
HUNYUAN15_SR = dict(HUNYUAN15, in_channels=98, meanflow=True)
LENS = dict(
    image_model="lens", in_channels=128, out_channels=32, num_layers=3, num_attention_heads=2, attention_head_dim=64,
    enc_hidden_dim=32, multi_layer_encoder_feature=True, selected_layer_index=(0, 1, 2),
)  # fmt: skip


class Vision:
    """Stands for the output of a CLIP vision model."""

    def __init__(self, draw, tokens: int, width: int):
        self.last_hidden_state = self.penultimate_hidden_states = draw(1, tokens, width)
        self.image_embeds = draw(1, width)


def guided(draw, shape, tokens):
    return {"guidance": 3.5}


def masked(draw, shape, tokens):
    """A mask between text and image, as the style models of Flux give it."""
    span = (shape[1] // 2, shape[2] // 2)
    length = tokens + span[0] * span[1]
    return {"guidance": 3.5, "attention_mask": draw(1, length, length), "attention_mask_img_shape": span}


def references(channels, *spans, method=None):
    def extras(draw, shape, tokens):
        entries = {"guidance": 3.5, "reference_latents": [draw(1, channels, *span) for span in spans]}
        return entries | ({"reference_latents_method": method} if method else {})

    return extras


def image(draw, shape, tokens):
    return {"guidance": 3.5, "concat_latent_image": draw(1, *shape)}


def prompt_mask(draw, shape, tokens):
    mask = torch.ones(1, tokens)
    mask[:, -tokens // 4 :] = 0
    return {"attention_mask": mask}


def first_frame(draw, shape, tokens):
    """The first frame is given, and its tokens are modulated apart from the others."""
    return {"concat_latent_image": draw(1, 16, *shape[1:]), "guiding_frame_index": 0}


def ref_latent(draw, shape, tokens):
    return {"ref_latent": draw(1, shape[0], 1, *shape[2:])}


def concat(channels, frames=None):
    def extras(draw, shape, tokens):
        return {"concat_latent_image": draw(1, channels, frames or shape[1], *shape[2:])}

    return extras


def glyphs(draw, shape, tokens):
    return {"conditioning_byt5small": draw(1, 6, 1472)}


def seen(draw, shape, tokens):
    mask = torch.ones(1, 1, *shape[1:])
    mask[:, :, :1] = 0
    return {"clip_vision_output": Vision(draw, 9, 64), "concat_latent_image": draw(1, *shape), "concat_mask": mask}


SETUPS = [
    Setup("flux", "Flux", FLUX, PATCHED, 64, 64, guided),
    Setup("flux_schnell", "FluxSchnell", NO_GUIDANCE, PATCHED, 64, 64),
    Setup("flux_kontext", "Flux", FLUX, PATCHED, 64, 64, references(16, (16, 16), (12, 8))),
    Setup("flux_uxo", "Flux", FLUX, PATCHED, 64, 64, references(16, (16, 16), (12, 8), method="uxo")),
    Setup("flux_mask", "Flux", FLUX, PATCHED, 64, 64, masked),
    Setup("flux_fill", "FluxInpaint", FLUX | {"in_channels": 96}, PATCHED, 64, 64, image),
    Setup("flux_control", "Flux", FLUX | {"in_channels": 32}, PATCHED, 64, 64, image),
    Setup("ovis", "FluxSchnell", TEXT_ONLY | {"yak_mlp": True, "txt_norm": True}, PATCHED, 64),
    Setup("longcat", "LongCatImage", TEXT_ONLY, PATCHED, 64),
    Setup("flux2", "Flux2", FLUX2, sizes(128, *SMALL), 64, None, guided),
    Setup("flux2_edit", "Flux2", FLUX2, sizes(128, *SMALL), 64, None, references(128, (8, 8), (6, 4))),
    Setup("flux2_klein", "Flux2", FLUX2 | {"guidance_embed": False}, sizes(128, *SMALL), 64),
    Setup("chroma", "Chroma", CHROMA, PATCHED, 64),
    Setup("chroma_radiance", "ChromaRadiance", RADIANCE, sizes(3, (64, 64), (96, 64), (128, 96)), 64),
    Setup("chroma_radiance_linear", "ChromaRadiance", LINEAR, sizes(3, (64, 64), (96, 64), (128, 96)), 64),
    Setup("hunyuan_video", "HunyuanVideo", HUNYUAN, sizes(16, *VIDEO), 64, 64),
    # The host's masks and reference frames fail for a batch of more than one.
    Setup("hunyuan_video_mask", "HunyuanVideo", HUNYUAN, sizes(16, *VIDEO), 64, 64, prompt_mask, max_batch=1),
    Setup("hunyuan_video_i2v", "HunyuanVideoI2V", HUNYUAN_I2V, sizes(16, *VIDEO), 64, 64, first_frame),
    Setup("hunyuan_custom", "HunyuanVideo", HUNYUAN, sizes(16, *VIDEO), 64, 64, ref_latent, max_batch=1),
    Setup("skyreels_i2v", "HunyuanVideoSkyreelsI2V", HUNYUAN | {"in_channels": 32}, sizes(16, *VIDEO), 64, 64, concat(16)),
    Setup("hunyuan_video_15", "HunyuanVideo15", HUNYUAN15, sizes(32, *VIDEO), 64),
    Setup("hunyuan_video_15_i2v", "HunyuanVideo15", HUNYUAN15, sizes(32, *VIDEO), 64, None, seen),
    Setup("hunyuan_video_15_sr", "HunyuanVideo15_SR_Distilled", HUNYUAN15_SR, sizes(32, *VIDEO), 64, None, concat(66)),
    Setup("hunyuan_image21", "HunyuanImage21", IMAGE21, sizes(64, *SMALL), 64, None, glyphs),
    Setup("hunyuan_image21_distilled", "HunyuanImage21", DISTILLED21, sizes(64, *SMALL), 64),
    Setup("hunyuan_image21_refiner", "HunyuanImage21Refiner", REFINER21, sizes(64, *FRAME), 64, None, concat(32, 1)),
    Setup("lens", "Lens", LENS, sizes(128, *SMALL), 96, None, prompt_mask),
]
