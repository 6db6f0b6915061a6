"""Define the node Fix Compiled Keys (_orig_mod)."""

from comfy_api.latest import io

from ..engine.host.nodes.repair import files, repair


class FixKeys(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitFixKeys",
            display_name="Fix Compiled Keys (_orig_mod)",
            category="torch compile",
            description="For a LoRA or a model that a trainer saved while it was compiled, and that loads with missing or "
            "unexpected keys: writes a copy beside it whose keys have no _orig_mod. Weights are copied as they are.",
            search_aliases=["_orig_mod", "unexpected key", "lora key not loaded", "torch.compile"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "file",
                    options=files(),
                    tooltip="A .safetensors file. The copy is called NAME_repaired.safetensors; reload the page to choose it.",
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file that can be loaded.")],
        )

    @classmethod
    def execute(cls, file) -> io.NodeOutput:
        path, sentence = repair(file)
        return io.NodeOutput(str(path), ui={"text": [sentence]})
