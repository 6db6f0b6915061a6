"""Define the node VAE Channels Last."""

from comfy_api.latest import io

from ..engine.host.model.vae import attach_vae


class VAEChannelsLast(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitVAEChannelsLast",
            display_name="VAE Channels Last",
            category="torch compile",
            description="Makes decoding and encoding faster: stores images in the memory layout that the GPU's convolutions "
            "prefer. Nothing is compiled. Measures both layouts on your first decodes and keeps the faster.",
            search_aliases=["compile vae", "vae decode", "channels_last"],
            inputs=[io.Vae.Input("vae", tooltip="The VAE for VAE Decode and VAE Encode, tiled or not.")],
            outputs=[
                io.Vae.Output(display_name="vae", tooltip="The same VAE; what is connected to the first one is unchanged.")
            ],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # or ComfyUI reuses the output of a node of another id, whose line that output updates
        )

    @classmethod
    def execute(cls, vae) -> io.NodeOutput:
        return io.NodeOutput(attach_vae(vae, getattr(cls.hidden, "unique_id", None)))
