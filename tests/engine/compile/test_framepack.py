"""FramePack's model, the class of diffusers: ComfyUI has none, and packs that bring it sample by themselves."""

import pytest
import torch
from support import relative_error

SIZES = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
    "num_single_layers": 3, "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 2, "patch_size_t": 1,
    "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6), "image_proj_dim": 16,
    "has_image_proj": True, "has_clean_x_embedder": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def framepack():
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    torch.manual_seed(0)
    return HunyuanVideoFramepackTransformer3DModel(**SIZES).eval()


def section(frames, height, tokens):
    """Inputs of one section of a video: frames to make, and what went before, the further back the coarser."""
    generator = torch.Generator().manual_seed(frames)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    kept = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
    inputs = {name: random(1, 4, count, height, 16) for name, count in kept.items()}
    inputs |= {f"indices_{name}": torch.arange(count) for name, count in kept.items()}
    return inputs | {
        "hidden_states": random(1, 4, frames, height, 16), "indices_latents": torch.arange(frames) + 20,
        "timestep": torch.tensor([500.0]), "encoder_hidden_states": random(1, tokens, 16),
        "encoder_attention_mask": torch.ones(1, tokens), "pooled_projections": random(1, 8),
        "image_embeds": random(1, 5, 16), "guidance": torch.tensor([6000.0]), "return_dict": False,
    }  # fmt: skip


@pytest.mark.usefixtures("inference_mode")
def test_its_blocks_compile_once_for_sections_of_any_length(engine, framepack):
    settings = engine("settings").CompileSettings(backend="eager")
    plan = engine("compile.binding").plan_for(framepack)
    assert {block.class_name for block in plan.blocks} >= {
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
    }
    groups, graphs = engine("compile.registry").code_of(framepack).groups, []
    with engine("compile.session").watching:
        for sizes in ((3, 16, 7), (3, 16, 7), (9, 16, 7), (3, 24, 12)):
            inputs = section(*sizes)
            (expected,) = framepack(**inputs)
            with engine("compile.binding").Binding(framepack, settings).bound():
                (ours,) = framepack(**inputs)
            assert relative_error(ours, expected) < 1e-5
            graphs.append(sum(group.stats.graphs for group in groups.values()))
    assert not [group.failure.message() for group in groups.values() if group.failure]
    assert len(set(graphs)) == 1 and graphs[0] == len(groups) and not any(g.stats.graph_breaks for g in groups.values())
