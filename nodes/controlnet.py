"""Define the node Torch Compile ControlNet."""

from comfy_api.latest import io

from ..engine import settings as choices
from ..engine.host.model.controlnet import attach_control
from ..engine.settings import CompileSettings
from .inputs import WITH_LINE


class CompileControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitControlNet",
            display_name="Torch Compile ControlNet",
            category="torch compile",
            description="Makes the steps with a ControlNet faster: compiles its repeated blocks as Torch Compile does "
            "those of the model. Put it between Load ControlNet Model and Apply ControlNet.",
            search_aliases=["compile controlnet"],
            inputs=[
                io.ControlNet.Input("control_net", tooltip="The ControlNet to compile."),
                io.Combo.Input(
                    "mode",
                    options=list(choices.MODES),
                    default="auto",
                    tooltip="As in Torch Compile: auto records it in CUDA graphs where the GPU waits for the CPU.",
                ),
                io.Combo.Input(
                    "compile_when",
                    options=list(choices.COMPILE_WHEN),
                    default="in background",
                    tooltip="in background: images go on uncompiled until it is compiled. before first image: the first "
                    "image waits.",
                ),
            ],
            outputs=[
                io.ControlNet.Output(
                    display_name="control_net",
                    tooltip="The same ControlNet; what is connected to the first one stays uncompiled.",
                )
            ],
            **WITH_LINE,
        )

    @classmethod
    def execute(cls, control_net, **inputs) -> io.NodeOutput:
        return io.NodeOutput(attach_control(control_net, CompileSettings(**inputs), getattr(cls.hidden, "unique_id", None)))
