"""Models of ComfyUI 0.31 and later: Wan Animate 2, LTX 2.5, MiniMax Music 3, Trellis 2. Older hosts leave them out by name."""

import comfy.ops
import torch

from .builders import CPU, Setup, sizes
from .flux_family import Vision
from .video_family import LTXAV23, SOUND
from .wan_family import I2V, VIDEO, i2v

ANIMATE2 = I2V | {"model_type": "animate2"}
LTXAV25 = dict(LTXAV23, ff_bias=False, audio_ff_bias=False, connector_ff_bias=False, use_keyframes_abs_pos_embedding=True)
TRELLIS2 = dict(
    image_model="trellis2", resolution=64, model_channels=64, cond_channels=64, num_blocks=2, num_heads=1, mlp_ratio=2.0
)


def pose(draw, shape, tokens):
    """A reference image in the first frame, and a pose for each of the others."""
    return i2v(draw, shape, tokens) | {
        "pose_video_latent": draw(1, 16, shape[1] - 1, *shape[2:]),
        "clip_vision_output_pose": Vision(draw, 17, 1280),
        "cross_attn_pose": draw(1, tokens, 64),
    }


def keyframe(draw, shape, tokens):
    _, length, height, width = shape[0]
    return {"generated_keyframes": {"tokens_per_frame": height * width, "first_latent_frame": length - 1, "num_keyframes": 1}}


def loudness(draw, shape, tokens):
    return {"conditioning_scale": torch.ones(1, 1, 1)}


def small_music(model):
    """The host fixes the widths of this network at those of 2.5 billion parameters; its blocks take others."""
    from comfy.ldm.minimax_music.dit import TransformerBlock

    operations, network = comfy.ops.disable_weight_init, model.diffusion_model
    network.latent_conditioners[0] = operations.Conv1d(4096, 64, kernel_size=3, padding=1)
    outer = network.diffusion_transformer
    outer.preprocess_conv = operations.Conv1d(320, 320, 1, bias=False)
    outer.to_timestep_embed[0], outer.to_timestep_embed[2] = operations.Linear(256, 128), operations.Linear(128, 128)
    inner = outer.transformer
    inner.project_in, inner.project_out = operations.Linear(320, 128, bias=False), operations.Linear(128, 128, bias=False)
    inner.layers = torch.nn.ModuleList(TransformerBlock(128, 64, 256, torch.float32, CPU, operations) for _ in range(3))
    network.to_empty(device=CPU)


def music_buffers(model, draw):
    """A checkpoint brings these along."""
    for name, buffer in model.diffusion_model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(10000.0 ** -(torch.arange(len(buffer)) / len(buffer)))
        else:
            buffer.copy_(draw(*buffer.shape, scale=0.05))


def image(draw, shape, tokens):
    return {"embeds": draw(1, tokens, 64)}


def voxels(draw, shape, tokens):
    """The cells of a coarse grid that the object fills; all of them are shape to be found."""
    cells = torch.cartesian_prod(*map(torch.arange, (1, 4, 4, shape[1] // 16))).int()
    return image(draw, shape, tokens) | {
        "trellis2_generation_mode": "shape_generation",
        "trellis2_coords": cells,
        "trellis2_coord_counts": torch.tensor([len(cells)]),
    }


SETUPS = [
    Setup("wan_animate2", "WAN_Animate2", ANIMATE2, VIDEO, 64, None, pose),
    Setup("ltxav_25", "LTXAV", LTXAV25, SOUND, 192, None, keyframe, needs="comfy.ldm.lightricks.duration_head"),
    # 12 frames of its text encoder, in eight layers of 4096, make 41 frames of sound.
    Setup(
        "minimax_music3",
        "MiniMaxMusic3",
        {"audio_model": "minimax_music3"},
        sizes(128, (41,), (60,), (100,)),
        32768,
        None,
        loudness,
        amend=small_music,
        finish=music_buffers,
        device=torch.device("meta"),
    ),
    Setup("trellis2_structure", "Trellis2", TRELLIS2, sizes(32, *((16, 16, 16),) * 3), 64, None, image),
    Setup("trellis2_shape", "Trellis2", TRELLIS2, sizes(32, (48, 1), (64, 1), (96, 1)), 64, None, voxels),
]
