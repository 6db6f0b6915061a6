"""Define the node Torch Compile."""

from comfy_api.latest import io

from ..engine import settings as choices
from ..engine.host.model.attach import attach
from ..engine.settings import CompileSettings
from ..engine.user_input import check_model
from .inputs import WITH_LINE


class TorchCompile(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitModel",
            display_name="Torch Compile",
            category="torch compile",
            description="Makes sampling faster: compiles the repeated blocks of the model with torch.compile while your first "
            "images run as usual. To compile before the first image, add Torch Compile Warmup after it. Not core's "
            "TorchCompileModel: compiles per block, in the background.",
            search_aliases=["torch.compile", "compile model", "speed", "faster", "acceleration", "inductor", "optimize"],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model to compile. LoRA nodes may come before or after."),
                io.Combo.Input(
                    "mode",
                    options=list(choices.MODES),
                    default="auto",
                    tooltip="Leave it on auto, which adds CUDA graphs where they help (SD 1.5, SDXL). default: never. "
                    "reduce-overhead: always. max-autotune: minutes of compiling for two percent at most.",
                ),
                io.Combo.Input(
                    "compile_when",
                    options=list(choices.COMPILE_WHEN),
                    default="in background",
                    tooltip="in background: images go on uncompiled until the compiled blocks are ready, also at a new size or "
                    "with a new patch. before first image: the first image waits for them. The max-autotune modes always wait.",
                ),
                io.Combo.Input(
                    "backend",
                    options=list(choices.BACKENDS),
                    default="inductor",
                    advanced=True,
                    tooltip="inductor makes fast kernels. cudagraphs replays recorded kernels (NVIDIA). aot_eager and eager "
                    "are for finding errors. none passes the model through unchanged.",
                ),
                io.Combo.Input(
                    "dynamic",
                    options=list(choices.DYNAMIC),
                    default="auto",
                    advanced=True,
                    tooltip="auto, true: compiled once for all sizes. false: compiled again for every size; at "
                    "most 1 % faster.",
                ),
                io.Boolean.Input(
                    "fullgraph",
                    default=False,
                    advanced=True,
                    tooltip="Treat code that cannot become one graph as a failure (see on_failure), instead of splitting it.",
                ),
                io.Int.Input(
                    "cache_limit",
                    default=0,
                    min=0,
                    max=choices.MAX_CACHE_LIMIT,
                    advanced=True,
                    tooltip="Matters with dynamic = false above all: how many variants of a kind of block (each size is one) "
                    f"are compiled before others run uncompiled. 0 = {choices.AUTOMATIC_CACHE_LIMIT}.",
                ),
                io.Combo.Input(
                    "block_swap",
                    options=list(choices.BLOCK_SWAP),
                    default="auto",
                    advanced=True,
                    tooltip="How blocks run whose weights are not on the GPU. auto puts them in place before the compiled "
                    "block runs, while the block before computes. uncompiled linears leaves their Linear layers uncompiled. "
                    "off refuses.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(choices.ATTENTION),
                    default="auto",
                    advanced=True,
                    tooltip="The attention kernel. auto measures those of PyTorch once on your model and takes the fastest, "
                    "unless ComfyUI was started with another (sage, flash, xformers). comfyui keeps ComfyUI's. flash "
                    "is PyTorch's, not that of --use-flash-attention.",
                ),
                io.Combo.Input(
                    "on_failure",
                    options=list(choices.ON_FAILURE),
                    default="run uncompiled",
                    advanced=True,
                    tooltip="When a block cannot be compiled: run it uncompiled and say so, or stop with the error.",
                ),
                io.Boolean.Input(
                    "allow_tf32",
                    default=False,
                    advanced=True,
                    tooltip="Faster, less exact fp32 matrix products, only while this model samples (NVIDIA RTX 30 and up).",
                ),
                io.Boolean.Input(
                    "cudnn_benchmark",
                    default=False,
                    advanced=True,
                    tooltip="Let cuDNN try its convolution kernels and keep the fastest, only while this model samples.",
                ),
                io.String.Input(
                    "only_blocks",
                    default="",
                    advanced=True,
                    tooltip="Compile only these blocks: comma-separated patterns of block paths, for example "
                    "double_blocks.*, single_blocks.1?. Empty compiles every block found.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model; its blocks run compiled.")],
            **WITH_LINE,
        )

    # No `validate_inputs`: ComfyUI shows its error on every input in its signature, also on valid and hidden inputs.
    @classmethod
    def execute(cls, model, **inputs) -> io.NodeOutput:
        check_model(model)
        return io.NodeOutput(attach(model, CompileSettings(**inputs), getattr(cls.hidden, "unique_id", None)))
