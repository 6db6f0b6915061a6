"""Define the node VAE Channels Last."""

from comfy_api.latest import io

from ..engine.host.model.vae import attach_vae
from .inputs import WITH_LINE


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
            **WITH_LINE,
        )

    @classmethod
    def execute(cls, vae) -> io.NodeOutput:
        return io.NodeOutput(attach_vae(vae, getattr(cls.hidden, "unique_id", None)))
