"""UNets: Stable Diffusion 1, 2 and XL with their kin, and Stable Cascade."""

import torch

from .builders import Setup, sizes

SPANS = ((16, 16), (24, 16), (32, 24))


def unet(
    levels=2,
    depth=(1, 1, 1, 1),
    out_depth=(1,) * 6,
    middle=1,
    context=64,
    adm=None,
    linear=True,
    in_channels=4,
    channels=64,
    mult=(1, 2),
    **more,
):
    config = {
        "image_size": 32,
        "use_checkpoint": False,
        "use_spatial_transformer": True,
        "legacy": False,
        "in_channels": in_channels,
        "out_channels": 4,
        "model_channels": channels,
        "num_res_blocks": [2] * levels,
        "channel_mult": list(mult),
        "transformer_depth": list(depth),
        "transformer_depth_output": list(out_depth),
        "transformer_depth_middle": middle,
        "context_dim": context,
        "adm_in_channels": adm,
        "use_linear_in_transformer": linear,
        "use_temporal_attention": False,
        "use_temporal_resblock": False,
    }
    if adm is not None:
        config["num_classes"] = "sequential"
    return config | more


def xl(depths, out_depths, middle, **more):
    return unet(
        levels=len(depths) // 2,
        depth=depths,
        out_depth=out_depths,
        middle=middle,
        channels=32,
        mult=(1, 2, 4)[: len(depths) // 2],
        **more,
    )


def distilled(depths, out_depths, middle, **more):
    """One residual block less in each level, as in the distilled SDXL models."""
    return xl(depths * 2, out_depths, middle, **more) | {
        "num_res_blocks": [1] * len(depths),
        "transformer_depth": list(depths),
        "channel_mult": [1, 2, 4],
    }


def video(adm):
    return unet(in_channels=8, adm=adm, mult=(1, 1)) | {
        "extra_ff_mix_layer": True,
        "use_spatial_context": True,
        "merge_strategy": "learned_with_images",
        "merge_factor": 0.0,
        "video_kernel_size": [3, 1, 1],
        "use_temporal_resblock": True,
        "use_temporal_attention": True,
        "disable_temporal_crossattention": False,
    }


def image_latent(draw, shape, tokens):
    return {"concat_latent_image": draw(1, 4, *shape[1:])}


def inpaint(draw, shape, tokens):
    mask = torch.zeros(1, 1, *shape[1:])
    mask[..., shape[1] // 2 :] = 1.0
    return {"concat_latent_image": draw(1, 4, *shape[1:]), "concat_mask": mask}


def low_resolution(draw, shape, tokens):
    return {"concat_image": draw(1, 3, *shape[1:]), "noise_augmentation": 0.1}


def orbit(draw, shape, tokens):
    return image_latent(draw, shape, tokens) | {"elevation": [10.0] * 4, "azimuth": [0.0, 90.0, 180.0, 270.0]}


def unclip(draw, shape, tokens, width=768):
    class Seen:
        image_embeds = draw(1, width)

    return {"unclip_conditioning": [{"clip_vision_output": Seen, "strength": 1.0, "noise_augmentation": 0.0}]}


def unclip_h(draw, shape, tokens):
    return unclip(draw, shape, tokens, 1024)


def projection(draw):
    return {"cc_projection.weight": draw(64, 64, scale=0.05), "cc_projection.bias": draw(64, scale=0.05)}


def prior(draw, shape, tokens):
    return {"stable_cascade_prior": draw(1, 16, shape[1] // 4, shape[2] // 4)}


SDXL = xl((0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1, 2, 2, 2), 2, adm=2816)
REFINER = unet(depth=(0, 2), out_depth=(0, 0, 2, 2), middle=2, adm=2560, channels=32, num_res_blocks=[1, 1])
# The host says for four levels which of them attend to themselves.
X4 = dict(depth=(0, 1, 1, 1), out_depth=(0, 0, 1, 1, 1, 1, 1, 1), mult=(1, 1, 1, 1), num_res_blocks=[1, 1, 1, 1])
CONCAT = unet(linear=False, in_channels=8)
ONE_TOKEN = dict(tokens=1, fixed_tokens=True)
FOUR = sizes(4, *SPANS)
STAGE_C = dict(
    stable_cascade_stage="c", c_cond=64, c_hidden=[64, 64], nhead=[2, 2], blocks=[[2, 3], [3, 2]], c_clip_text=64,
    c_clip_text_pooled=64,
)  # fmt: skip
STAGE_B = dict(
    stable_cascade_stage="b", c_cond=64, c_hidden=[32, 32, 64, 64], nhead=[-1, -1, 2, 2], blocks=[[1, 2, 2, 2], [2, 2, 2, 1]],
    block_repeat=[[1, 1, 1, 1], [2, 2, 1, 1]], c_clip=64,
)  # fmt: skip

SETUPS = [
    Setup("sd15", "SD15", unet(linear=False), FOUR, 64, tokens=77),
    Setup("sd15_inpaint", "SD15", unet(linear=False, in_channels=9), FOUR, 64, tokens=77, extras=inpaint),
    Setup("sd15_ip2p", "SD15_instructpix2pix", CONCAT, FOUR, 64, tokens=77, extras=image_latent),
    Setup("sd20", "SD20", unet(), FOUR, 64, tokens=77),
    Setup("sd21_unclip", "SD21UnclipL", unet(adm=1536), FOUR, 64, tokens=77, extras=unclip),
    Setup("sd21_unclip_h", "SD21UnclipH", unet(adm=2048), FOUR, 64, tokens=77, extras=unclip_h),
    Setup("lotus", "LotusD", unet(adm=4), FOUR, 64, tokens=77),
    # The image takes the prompt's place.
    Setup("zero123", "Stable_Zero123", CONCAT, FOUR, 64, **ONE_TOKEN, extras=image_latent, tensors=projection),
    Setup("sdxl", "SDXL", SDXL, FOUR, 64, 1280, tokens=77),
    Setup("sdxl_ip2p", "SDXL_instructpix2pix", SDXL | {"in_channels": 8}, FOUR, 64, 1280, tokens=77, extras=image_latent),
    Setup("sdxl_refiner", "SDXLRefiner", REFINER, FOUR, 64, 1280, tokens=77),
    Setup("ssd1b", "SSD1B", xl((0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1, 2, 2, 2), -1, adm=2816), FOUR, 64, 1280, tokens=77),
    Setup("koala", "KOALA_700M", distilled((0, 2, 3), (0, 0, 2, 2, 3, 3), -2, adm=2816), FOUR, 64, 1280, tokens=77),
    Setup("koala_1b", "KOALA_1B", distilled((0, 2, 6), (0, 0, 2, 2, 6, 6), 6, adm=2816), FOUR, 64, 1280, tokens=77),
    Setup("vega", "Segmind_Vega", xl((0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1, 2, 2, 2), -1, adm=2816), FOUR, 64, 1280, tokens=77),
    Setup("svd_img2vid", "SVD_img2vid", video(768), FOUR, 64, rows=4, **ONE_TOKEN, extras=image_latent),
    Setup("sv3d_u", "SV3D_u", video(256), FOUR, 64, rows=4, **ONE_TOKEN, extras=image_latent),
    Setup("sv3d_p", "SV3D_p", video(1280), FOUR, 64, rows=4, **ONE_TOKEN, extras=orbit),
    Setup("sd_x4", "SD_X4Upscaler", unet(in_channels=7, channels=32, **X4), FOUR, 64, tokens=77, extras=low_resolution),
    Setup("cascade_c", "Stable_Cascade_C", STAGE_C, sizes(16, (12, 12), (16, 12), (24, 16)), 64, 64, tokens=77),
    Setup("cascade_b", "Stable_Cascade_B", STAGE_B, sizes(4, (32, 32), (48, 32), (64, 48)), None, 64, extras=prior),
]
