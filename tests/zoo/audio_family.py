"""Sound and shape: ACE-Step, Stable Audio, Hunyuan3D, TripoSplat."""

import comfy.ldm.ace.lyric_encoder
import comfy.ldm.audio.embedders
import comfy.ops
import torch

from .builders import Draw, Setup, sizes

ACE1 = dict(
    audio_model="ace", attention_head_dim=64, in_channels=8, inner_dim=128, max_height=16, max_position=4096, max_width=4096,
    mlp_ratio=2.5, num_attention_heads=2, num_layers=3, out_channels=8, patch_size=[16, 1], rope_theta=1000000.0,
    speaker_embedding_dim=512, text_embedding_dim=64, ssl_encoder_depths=[8, 8], ssl_latent_dims=[64, 64],
    ssl_names=["mert", "m-hubert"], lyric_encoder_vocab_size=6693, lyric_hidden_size=64,
)  # fmt: skip
ACE15 = dict(
    audio_model="ace1.5", hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1, head_dim=32,
    encoder_hidden_size=64, encoder_num_heads=2, encoder_intermediate_size=128, num_dit_layers=6, num_lyric_layers=2,
    num_timbre_layers=2, text_hidden_dim=64, sliding_window=8, fsq_dim=64,
)  # fmt: skip
STABLE_AUDIO = dict(
    audio_model="dit1.0", global_cond_dim=128, cond_token_dim=64, project_cond_tokens=False, embed_dim=128, num_heads=2,
    timestep_features_type="learned", io_channels=64, input_concat_dim=0, depth=3,
)  # fmt: skip
STABLE_AUDIO3 = dict(
    audio_model="dit1.0", global_cond_dim=768, project_cond_tokens=True, embed_dim=128, num_heads=2, num_memory_tokens=4,
    attn_kwargs={"qk_norm": "rms", "differential": True}, norm_type="rms_norm", timestep_features_type="expo", io_channels=64,
    input_concat_dim=0, local_add_cond_dim=65, global_cond_shared_embed=True, global_cond_type="adaLN", depth=3,
)  # fmt: skip
HUNYUAN3D = dict(
    image_model="hunyuan3d2", in_channels=64, context_in_dim=64, hidden_size=128, mlp_ratio=4.0, num_heads=2, depth=3,
    depth_single_blocks=3, qkv_bias=True, guidance_embed=False,
)  # fmt: skip
HUNYUAN3D21 = dict(
    image_model="hunyuan3d2_1", in_channels=64, context_dim=64, hidden_size=128, mlp_ratio=4.0, num_heads=2, depth=6,
    num_moe_layers=2, num_experts=4, qkv_bias=False, guidance_cond_proj_dim=None,
)  # fmt: skip
TRIPOSPLAT = dict(
    image_model="triposplat", q_token_length=64, model_channels=128, cond_channels=64, num_blocks=3, num_refiner_blocks=2
)
TOKENS = sizes(64, (64,), (96,), (160,))


def lyrics(draw, shape, tokens):
    return {"conditioning_lyrics": draw.ids(1, 10, below=6000)}


def small_lyrics(model):
    """The host fixes the width of this encoder, which comes before the blocks, at 1024."""
    model.diffusion_model.lyric_encoder = comfy.ldm.ace.lyric_encoder.ConformerEncoder(
        input_size=64,
        output_size=64,
        attention_heads=2,
        linear_units=128,
        num_blocks=2,
        static_chunk_size=0,
        operations=comfy.ops.disable_weight_init,
    )


def embedded_lyrics(draw, shape, tokens):
    return {"conditioning_lyrics": draw(1, 10, 64)}


def codes(draw, shape, tokens):
    return embedded_lyrics(draw, shape, tokens) | {"audio_codes": draw.ids(1, shape[1] // 5, below=60000).tolist()}


def timbre(draw, shape, tokens):
    return embedded_lyrics(draw, shape, tokens) | {"reference_audio_timbre_latents": [draw(1, *shape)]}


def seconds(draw: Draw, name: str, most: int, features: str) -> dict:
    embedder = comfy.ldm.audio.embedders.NumberConditioner(768, min_val=0, max_val=most, fourier_features_type=features)
    return {
        f"conditioner.conditioners.{name}.{key}": draw(*value.shape, scale=0.05) for key, value in embedder.state_dict().items()
    }


def seconds1(draw):
    return {**seconds(draw, "seconds_start", 512, "learned"), **seconds(draw, "seconds_total", 512, "learned")}


def small_seconds(model):
    """At the host's width of 768 the keys would have more heads than the queries of so small a model."""
    for name in ("seconds_start_embedder", "seconds_total_embedder"):
        setattr(model, name, comfy.ldm.audio.embedders.NumberConditioner(64, min_val=0, max_val=512))


def seconds3(draw):
    return {
        **seconds(draw, "seconds_total", 384, "expo"),
        "conditioner.conditioners.prompt.padding_embedding": draw(768, scale=0.05),
    }


def frequencies(model, draw):
    """A checkpoint brings this buffer along."""
    table = model.diffusion_model.transformer.rotary_pos_emb.inv_freq
    table.copy_(10000.0 ** -(torch.arange(len(table)) / len(table)))


def picture(draw, shape, tokens):
    return {"reference_latents": [draw(1, 128, 3, 4)]}


SETUPS = [
    Setup("ace_step1", "ACEStep", ACE1, sizes(8, (16, 40), (16, 60), (16, 100)), 64, None, lyrics, amend=small_lyrics),
    Setup("ace_step15", "ACEStep15", ACE15, sizes(64, (40,), (60,), (100,)), 64, None, embedded_lyrics),
    Setup("ace_step15_codes", "ACEStep15", ACE15, sizes(64, (40,), (60,), (100,)), 64, None, codes),
    Setup("ace_step15_timbre", "ACEStep15", ACE15, sizes(64, (40,), (60,), (100,)), 64, None, timbre),
    Setup("stable_audio", "StableAudio", STABLE_AUDIO, TOKENS, 64, tensors=seconds1, amend=small_seconds, finish=frequencies),
    Setup("stable_audio3", "StableAudio3", STABLE_AUDIO3, TOKENS, 768, tensors=seconds3, finish=frequencies),
    Setup("hunyuan3d_v2", "Hunyuan3Dv2", HUNYUAN3D, TOKENS, 64),
    Setup("hunyuan3d_v2_turbo", "Hunyuan3Dv2mini", HUNYUAN3D | {"guidance_embed": True}, TOKENS, 64),
    Setup("hunyuan3d_v21", "Hunyuan3Dv2_1", HUNYUAN3D21, TOKENS, 64),
    # Its number of points is part of the model, so that its three sizes are one.
    Setup("triposplat", "TripoSplat", TRIPOSPLAT, ([(64, 16), (1, 5)],) * 3, 64, None, picture, tokens=17),
]
