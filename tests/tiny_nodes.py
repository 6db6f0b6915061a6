"""Nodes for the tests' server: tiny models of which the host's loader knows only the full size, and their prompts."""

import importlib.util
import os

_spec = importlib.util.spec_from_file_location("tiny_models", os.environ["TINY_MODELS"])
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
NAME = {"name": (list(tiny_models.MODELS),)}


class TinyModel:
    INPUT_TYPES = classmethod(lambda cls: {"required": NAME})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "tests"

    def load(self, name):
        return (tiny_models.build_patcher(name),)


class TinyPrompts:
    INPUT_TYPES = classmethod(
        lambda cls: {"required": {**NAME, "positive_tokens": ("INT",), "negative_tokens": ("INT",), "seed": ("INT",)}}
    )
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    FUNCTION = "encode"
    CATEGORY = "tests"

    def encode(self, name, positive_tokens, negative_tokens, seed):
        positive, _ = tiny_models.conditioning(name, positive_tokens, seed)
        _, negative = tiny_models.conditioning(name, negative_tokens, seed)
        return positive, negative


NODE_CLASS_MAPPINGS = {"TestTinyModel": TinyModel, "TestTinyPrompts": TinyPrompts}
