"""Wan 2.1 and 2.2 and the models made of their blocks."""

import comfy.ldm.wan.model
import comfy.ops
import torch

from .builders import Setup, sizes
from .flux_family import Vision

WAN = dict(
    image_model="wan2.1", model_type="t2v", dim=128, num_heads=2, ffn_dim=256, num_layers=3, in_dim=16, out_dim=16,
    patch_size=(1, 2, 2), freq_dim=256, text_dim=64, window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6,
)  # fmt: skip
VACE = dict(WAN, model_type="vace", vace_layers=3, vace_in_dim=96, num_layers=6)
S2V = dict(WAN, model_type="s2v", audio_dim=16, audio_inject_layers=[0, 2])
CAUSAL = dict(WAN, causal_ar=True)
I2V = WAN | {"model_type": "i2v", "in_dim": 36}
ANIMATE = dict(I2V, model_type="animate", num_layers=10, motion_encoder_dim=32, dim=64, ffn_dim=128)
DANCER = dict(I2V, model_type="wandancer", audio_inject_layers=[0, 2], music_dim=64, music_latent_dim=64)
SPANS = ((3, 8, 8), (3, 16, 8), (5, 16, 16))
VIDEO = sizes(16, *SPANS)
# The blocks that pack earlier frames take them by eight.
PACKED = sizes(16, (3, 16, 16), (3, 24, 16), (5, 24, 24))


def clip(draw, tokens=17):
    return {"clip_vision_output": Vision(draw, tokens, 1280)}


def start_image(draw, shape, tokens):
    mask = torch.ones(1, 1, *shape[1:])
    mask[:, :, :1] = 0
    return {"concat_latent_image": draw(1, 16, *shape[1:]), "concat_mask": mask}


def i2v(draw, shape, tokens):
    return start_image(draw, shape, tokens) | clip(draw)


def both_ends(draw, shape, tokens):
    return start_image(draw, shape, tokens) | clip(draw, 34)


def control(draw, shape, tokens):
    return {"concat_latent_image": draw(1, 32, *shape[1:]), "reference_latents": [draw(1, 16, 1, *shape[2:])], **clip(draw)}


def camera(draw, shape, tokens):
    span = (shape[1], shape[2] * 8, shape[3] * 8)
    return start_image(draw, shape, tokens) | {"camera_conditions": draw(1, 24, *span)}


def camera_clip(draw, shape, tokens):
    return camera(draw, shape, tokens) | clip(draw)


def vace(draw, shape, tokens):
    return {"vace_frames": [draw(1, 32, *shape[1:])], "vace_mask": [torch.ones(1, 64, *shape[1:])], "vace_strength": [0.8]}


def first_frame(draw, shape, tokens):
    """The first frame is given: every frame then has its own timestep."""
    mask = torch.ones(1, *shape)
    mask[:, :, 0] = 0
    return {"denoise_mask": mask}


def in_context(draw, shape, tokens):
    return {"context_latents": [draw(1, 16, 1, *shape[2:])]}


def speech(draw, shape, tokens):
    frame = (1, *shape[2:])
    return {
        "audio_embed": draw(1, 25, 16, shape[1] * 4),
        "reference_latents": [draw(1, 16, *frame)],
        "reference_motion": draw(1, 16, 19, *shape[2:]),
        "control_video": draw(1, *shape),
    }


def human(draw, shape, tokens):
    return {"audio_embed": draw(1, shape[1], 8, 5, 16), "reference_latents": [draw(1, 16, 1, *shape[2:])]}


def animate(draw, shape, tokens):
    return i2v(draw, shape, tokens) | {
        "pose_video_latent": draw(1, 16, shape[1] - 1, *shape[2:]),
        "face_video_pixels": draw(1, 3, (shape[1] - 1) * 4, 16, 16),
    }


def pose(draw, shape, tokens):
    half = (shape[2] // 2, shape[3] // 2)
    return {"reference_latents": [draw(1, 16, 1, *shape[2:])], "pose_video_latent": draw(1, 16, shape[1], *half), **clip(draw)}


def pose_masks(draw, shape, tokens):
    half = (shape[2] // 2, shape[3] // 2)
    return pose(draw, shape, tokens) | {
        "driving_mask_28ch": (draw(1, shape[1], 28, *half) > 0).float(),
        "ref_mask_28ch": (draw(1, shape[1] + 1, 28, *shape[2:]) > 0).float(),
        "ref_mask_flag": False,
    }


def music(draw, shape, tokens):
    return i2v(draw, shape, tokens) | {
        "audio_embed": draw(1, shape[1] * 8, 35),
        "clip_vision_output_ref": Vision(draw, 17, 1280),
        "fps": 24.0,
        "audio_inject_scale": 0.8,
    }


def caches(model, x):
    network, seq = model.diffusion_model, x.shape[2] * (x.shape[3] // 2) * (x.shape[4] // 2)
    return {
        "ar_state": {
            "start_frame": 0,
            "kv_caches": network.init_kv_caches(len(x), seq, x.device, x.dtype),
            "crossattn_caches": network.init_crossattn_caches(len(x), x.device, x.dtype),
        }
    }


def small_audio(model):
    """The host fixes the width of this part, which is no block, at 39M parameters."""
    model.diffusion_model.audio_proj = comfy.ldm.wan.model.AudioProjModel(
        seq_len=8,
        blocks=5,
        channels=16,
        intermediate_dim=64,
        output_dim=1536,
        context_tokens=16,
        operations=comfy.ops.disable_weight_init,
    )


class SmallMotion(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project = comfy.ops.disable_weight_init.Linear(3, width)

    def get_motion(self, images):
        return self.project(images.mean((-1, -2)))


def small_motion(model):
    """The host's own reads faces of 512 pixels with 30M parameters; it comes before the blocks."""
    model.diffusion_model.motion_encoder = SmallMotion(32)


SETUPS = [
    Setup("wan21_t2v", "WAN21_T2V", WAN, VIDEO, 64),
    Setup("wan21_bernini", "WAN21_T2V", WAN, VIDEO, 64, None, in_context),
    Setup("wan21_i2v", "WAN21_I2V", I2V, VIDEO, 64, None, i2v),
    Setup("wan21_flf2v", "WAN21_I2V", I2V | {"flf_pos_embed_token_number": 34}, VIDEO, 64, None, both_ends),
    Setup("wan21_fun_control", "WAN21_FunControl2V", I2V | {"in_dim": 48, "in_dim_ref_conv": 16}, VIDEO, 64, None, control),
    Setup("wan21_flow_rvs", "WAN21_FlowRVS", WAN | {"model_type": "flow_rvs"}, VIDEO, 64),
    Setup("wan22_i2v", "WAN21_T2V", WAN | {"in_dim": 36}, VIDEO, 64, None, start_image),
    Setup("wan22_5b", "WAN22_T2V", WAN | {"in_dim": 48, "out_dim": 48}, sizes(48, *SPANS), 64),
    Setup("wan22_5b_i2v", "WAN22_T2V", WAN | {"in_dim": 48, "out_dim": 48}, sizes(48, *SPANS), 64, None, first_frame),
    Setup("wan_vace", "WAN21_Vace", VACE, VIDEO, 64, None, vace),
    Setup("wan_camera", "WAN21_Camera", I2V | {"model_type": "camera"}, VIDEO, 64, None, camera_clip),
    Setup("wan22_camera", "WAN22_Camera", I2V | {"model_type": "camera_2.2"}, VIDEO, 64, None, camera),
    Setup("wan_s2v", "WAN22_S2V", S2V, PACKED, 64, None, speech),
    Setup("wan_humo", "WAN21_HuMo", WAN | {"model_type": "humo"}, VIDEO, 64, None, human, amend=small_audio),
    Setup("wan_humo_17b", "WAN21_HuMo", WAN | {"model_type": "humo", "in_dim": 36}, VIDEO, 64, None, human, amend=small_audio),
    Setup("wan_animate", "WAN22_Animate", ANIMATE, VIDEO, 64, None, animate, amend=small_motion),
    Setup("wan_dancer", "WAN22_WanDancer", DANCER, VIDEO, 64, None, music),
    Setup("wan_causal", "WAN21_CausalAR_T2V", CAUSAL, VIDEO, 64),
    # In a session only the autoregressive sampler gives it its caches.
    Setup("wan_causal_cached", "WAN21_CausalAR_T2V", CAUSAL, VIDEO, 64, options=caches),
    Setup("wan_scail", "WAN21_SCAIL", WAN | {"model_type": "scail", "in_dim": 20}, VIDEO, 64, None, pose),
    Setup("wan_scail2", "WAN21_SCAIL2", WAN | {"model_type": "scail2", "in_dim": 20}, VIDEO, 64, None, pose_masks),
]
