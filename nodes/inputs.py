"""Define the inputs that several nodes have in common."""

from typing import Any

from comfy_api.latest import io

from ..engine.host.nodes.warmup_plan import MAX_BATCH, MAX_FRAMES, MAX_PIXELS, Size

# For nodes with a status line, which is kept by node id: ComfyUI must not reuse the cached output of an equal node.
WITH_LINE: dict[str, Any] = {"hidden": [io.Hidden.unique_id], "not_idempotent": True}


def size_of(width: int, height: int, length: int, batch_size: int) -> Size:
    return Size(width, height, length, batch_size)


def size_inputs() -> list:
    return [
        io.Int.Input("width", default=1024, min=16, max=MAX_PIXELS, step=8, tooltip="Image width in pixels."),
        io.Int.Input("height", default=1024, min=16, max=MAX_PIXELS, step=8, tooltip="Image height in pixels."),
        io.Int.Input("length", default=1, min=1, max=MAX_FRAMES, tooltip="Video frames; 1 for images."),
        io.Int.Input("batch_size", default=1, min=1, max=MAX_BATCH, tooltip="Images or videos made at once."),
        io.Float.Input(
            "cfg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="As in the sampler that follows: 1.0 runs the model once a step, more runs prompt and negative.",
        ),
    ]


def latent_input():
    return io.Latent.Input(
        "latent_image",
        optional=True,
        tooltip="The sampler's latent. Its size and batch replace width, height, length and batch_size.",
    )
