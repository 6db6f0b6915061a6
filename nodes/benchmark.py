"""Define the node Torch Compile Benchmark."""

from comfy_api.latest import io

from ..engine.host.nodes.benchmark import MAX_STEPS, benchmark
from .inputs import latent_input, size_inputs, size_of


class Benchmark(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitBenchmark",
            display_name="Torch Compile Benchmark",
            category="torch compile",
            description="Shows what compiling brings on your machine: samples in alternating uncompiled and compiled rounds "
            "and shows the time of a step, what compiling cost, and after how many images it has paid off.",
            search_aliases=["benchmark", "speed test", "it/s", "compiled vs uncompiled", "profile", "trace"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A model from Torch Compile; LoRA nodes may stand between."),
                io.Conditioning.Input("positive", tooltip="The prompt that the sampler gets."),
                io.Conditioning.Input("negative", tooltip="The negative prompt that the sampler gets."),
                *size_inputs(),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=MAX_STEPS,
                    tooltip="Steps of one image, as in the sampler. Six images are sampled; fewer steps take less time.",
                ),
                io.Boolean.Input(
                    "trace",
                    default=False,
                    tooltip="Also record one uncompiled and one compiled step with PyTorch's profiler into the output folder, "
                    "for ui.perfetto.dev, and count what they run.",
                ),
                latent_input(),
                io.Vae.Input("vae", optional=True, tooltip="To see which share of a prompt decoding takes."),
                io.Clip.Input("clip", optional=True, tooltip="To see which share of a prompt encoding its text takes."),
            ],
            outputs=[
                io.String.Output(display_name="table", tooltip="All figures as text."),
            ],
        )

    @classmethod
    def execute(
        cls, model, positive, negative, cfg, steps, trace, latent_image=None, vae=None, clip=None, **size
    ) -> io.NodeOutput:
        result = benchmark(model, positive, negative, size_of(**size), cfg, steps, trace, latent_image, vae, clip)
        table = result if isinstance(result, str) else result.table()
        return io.NodeOutput(table, ui={"text": [table]})
