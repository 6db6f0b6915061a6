"""Define the node Save Compile Cache."""

from comfy_api.latest import io

from ..engine.host.nodes.cache_files import not_saved, plain_name, save_cache
from ..engine.user_input import refusal


class SaveCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitSaveCache",
            display_name="Save Compile Cache",
            category="torch compile",
            description="Saves what is compiled for a model into one file, for another machine of the same kind (cloud pods): "
            "same GPU, same PyTorch. Put it after Torch Compile Warmup. This machine keeps compiled blocks without it.",
            search_aliases=["export compile cache", "torch.compile", "mega cache"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model from Torch Compile Warmup."),
                io.String.Input(
                    "filename",
                    default="compile_cache",
                    tooltip="Name of the file in the folder user/torch-compile-kit of ComfyUI. An older file of that name is "
                    "replaced.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The same model."),
                io.String.Output(display_name="path", tooltip="Where the file is: copy it to the same folder elsewhere."),
            ],
        )

    @classmethod
    def validate_inputs(cls, filename) -> bool | str:
        return filename is None or refusal(lambda: plain_name(filename))  # None: linked

    @classmethod
    def fingerprint_inputs(cls, filename, **_inputs) -> int:
        return not_saved[filename]

    @classmethod
    def execute(cls, model, filename) -> io.NodeOutput:
        path, report = save_cache(model, filename)
        return io.NodeOutput(model, str(path or ""), ui={"text": [report]})
