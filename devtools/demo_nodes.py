"""The demo's prompt, as a node for its server: the tiny Flux has no text encoder."""

import torch


class LighthousePrompt:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"tokens": ("INT",)}})
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "demo"

    def encode(self, tokens):
        return ([[torch.eye(tokens)[None], {"pooled_output": None}]],)


NODE_CLASS_MAPPINGS = {"LighthousePrompt": LighthousePrompt}
