"""The node Torch Compile Warmup."""

from comfy_api.latest import io

from ..engine.host.warmup import warm_up
from ..engine.warmup_plan import Size, parse_extra_sizes

MAX_PIXELS = 16384


class Warmup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitWarmup",
            display_name="Torch Compile Warmup",
            category="torch compile",
            description="Compiles the model for your sizes before the real work: runs a few steps of the real sampler at each "
            "size. Put it between Torch Compile Model and the sampler. Images are the same with and without it.",
            search_aliases=["warm up", "precompile", "torch.compile", "compile now"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="A model from Torch Compile Model; LoRA nodes may stand between."),
                io.Conditioning.Input("positive", tooltip="The prompt that the sampler gets: its length is compiled for."),
                io.Conditioning.Input("negative", tooltip="The negative prompt that the sampler gets."),
                io.Int.Input("width", default=1024, min=16, max=MAX_PIXELS, step=8, tooltip="Image width in pixels."),
                io.Int.Input("height", default=1024, min=16, max=MAX_PIXELS, step=8, tooltip="Image height in pixels."),
                io.Int.Input("length", default=1, min=1, max=MAX_PIXELS, tooltip="Video frames; 1 for images."),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="Images or videos made at once."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="As in the sampler that follows: 1.0 runs the model once a step, more runs prompt and negative.",
                ),
                io.String.Input(
                    "extra_sizes",
                    default="",
                    multiline=True,
                    tooltip="More sizes, one a line: 1216x832, 832x480x33 (with frames), each with an optional batch: "
                    "512x512 batch 4.",
                ),
                io.Latent.Input(
                    "latent_image",
                    optional=True,
                    tooltip="The sampler's latent. Its size and batch replace width, height, length and batch_size.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model, warmed up."),
                io.String.Output(display_name="report", tooltip="Blocks, graphs, seconds per size and what stayed eager."),
            ],
        )

    @classmethod
    def execute(
        cls, model, positive, negative, width, height, length, batch_size, cfg, extra_sizes, latent_image=None
    ) -> io.NodeOutput:
        sizes = [Size(width, height, length, batch_size), *parse_extra_sizes(extra_sizes)]
        report = warm_up(model, positive, negative, cfg, sizes, latent_image, cls.hidden.unique_id)
        return io.NodeOutput(model, report, ui={"text": [report]})
