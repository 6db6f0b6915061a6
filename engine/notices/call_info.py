"""Tell two calls of a model apart in the user's units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallInfo:
    """Size, batch, prompt length and patches of one call of a model.

    Args:
        width, height: pixels; 0 where the model has none.
        length: frames.
        batch: images or videos.
        prompts_per_call: how many prompts the sampler ran in one batch; cfg above 1 runs the negative with the positive.
        tokens: length of the prompt.
        controlnet: a ControlNet gave the model something to add.
        inputs: names of other tensors of the conditioning, with their shapes without the batch.
        patches: names of the patches in the model.
        layers: names of functions that run in place of layers.
    """

    width: int = 0
    height: int = 0
    length: int = 1
    batch: int = 1
    prompts_per_call: int = 1
    tokens: int = 0
    controlnet: bool = False
    inputs: tuple[tuple[str, tuple], ...] = ()
    patches: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def size(self) -> str:
        """As a line of extra_sizes."""
        frames = f"x{self.length}" if self.length > 1 else ""
        size = f"{self.width}x{self.height}{frames}" if self.width else "the latent's size"
        return f"{size} batch {self.batch}" if self.batch > 1 else size
