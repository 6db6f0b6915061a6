"""Define the node that makes the demo's conditioning: the tiny Flux has no text encoder."""

import torch


class LighthousePrompt:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"tokens": ("INT",)}})
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "demo"

    def encode(self, tokens):
        return ([[torch.eye(tokens)[None], {"pooled_output": None}]],)


NODE_CLASS_MAPPINGS = {"LighthousePrompt": LighthousePrompt}
