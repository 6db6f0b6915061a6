"""Define the node Torch Compile Warmup."""

from comfy_api.latest import io

from ..engine.host.nodes.warmup import warm_up
from ..engine.host.nodes.warmup_plan import Size, parse_extra_sizes
from ..engine.user_input import refusal
from .inputs import latent_input, size_inputs


class Warmup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitWarmup",
            display_name="Torch Compile Warmup",
            category="torch compile",
            description="Compiles the model for your sizes before the real work: runs a few steps of the real sampler at each "
            "size. Put it between Torch Compile and the sampler. Images are the same with and without it.",
            search_aliases=["warm up", "precompile", "torch.compile", "compile now"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="A model from Torch Compile; LoRA nodes may stand between."),
                io.Conditioning.Input("positive", tooltip="The prompt that the sampler gets: its length is compiled for."),
                io.Conditioning.Input("negative", tooltip="The negative prompt that the sampler gets."),
                *size_inputs(),
                io.String.Input(
                    "extra_sizes",
                    default="",
                    multiline=True,
                    tooltip="More sizes, one a line or separated by commas: 1216x832, 832x480x33 (with frames), each with an "
                    "optional batch: 512x512 batch 4.",
                ),
                latent_input(),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model, warmed up."),
                io.String.Output(
                    display_name="report", tooltip="Compiled blocks, seconds per size and what stayed uncompiled."
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, extra_sizes) -> bool | str:
        return extra_sizes is None or refusal(lambda: parse_extra_sizes(extra_sizes))  # None: linked

    @classmethod
    def execute(
        cls, model, positive, negative, width, height, length, batch_size, cfg, extra_sizes, latent_image=None
    ) -> io.NodeOutput:
        sizes = [Size(width, height, length, batch_size), *parse_extra_sizes(extra_sizes)]
        report = warm_up(model, positive, negative, cfg, sizes, latent_image, cls.hidden.unique_id)
        return io.NodeOutput(model, report, ui={"text": [report]})
