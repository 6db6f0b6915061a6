"""Define the node Torch Compile Block Swap."""

from comfy_api.latest import io

from ..engine.host.weights.swap import MOST_BLOCKS, swap_blocks
from ..engine.messages.words import say


class BlockSwap(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitBlockSwap",
            display_name="Torch Compile Block Swap",
            category="torch compile",
            description="Keeps some blocks of the model in RAM, for ComfyUI without dynamic VRAM. With Torch Compile "
            "they are copied to the GPU while the block before computes.",
            search_aliases=["block swap", "blocks_to_swap", "low vram", "offload"],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model; before or after Torch Compile."),
                io.Int.Input(
                    "blocks_to_swap",
                    default=10,
                    min=0,
                    max=MOST_BLOCKS,
                    tooltip="How much to keep in RAM, counted in blocks. More saves VRAM and costs time.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model, with less of it on the GPU.")],
        )

    @classmethod
    def execute(cls, model, blocks_to_swap) -> io.NodeOutput:
        swap = swap_blocks(model, blocks_to_swap)
        if swap.size is None:
            return io.NodeOutput(swap.patcher, ui={"text": [say("swapDynamic")]})
        text = say("swapped", swap.swapped, swap.blocks, f"{swap.size / 2**30:.1f}")
        if blocks_to_swap > swap.swapped:
            text = say("swappedAll", text, blocks_to_swap)
        return io.NodeOutput(swap.patcher, ui={"text": [text]})
