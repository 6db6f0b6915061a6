"""Check node inputs before they are used: the host lets switches and scripts send anything into any input.

Each `check_...` raises InvalidSetting.
"""

import math
from collections.abc import Callable

from .errors import InvalidSetting


def refusal(check: Callable[[], object]) -> bool | str:
    """What a node's `validate_inputs` returns: True, or the text of the InvalidSetting that `check` raises."""
    try:
        check()
    except InvalidSetting as error:
        return str(error)
    return True


def check_whole(name: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int):
        raise InvalidSetting(name, value, f"use a whole number, {lowest} to {highest}.")
    if not lowest <= value <= highest:
        raise InvalidSetting(name, value, f"use {lowest} to {highest}.")


def check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidSetting(name, value, "use a number.")


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, int) or value not in (True, False):
        raise InvalidSetting(name, value, "use true or false.")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidSetting(name, value, "use a text.")


def check_model(value: object) -> None:
    if not hasattr(getattr(value, "model", None), "diffusion_model"):
        raise InvalidSetting("model", value, "connect a diffusion model, such as that of Load Diffusion Model.")


def check_sampling(positive: object, negative: object, cfg: object, latent: object = None) -> None:
    for name, value in (("positive", positive), ("negative", negative)):
        if not isinstance(value, (list, tuple)) or not all(map(_is_conditioning, value)):
            raise InvalidSetting(name, value, "connect a conditioning, such as that of CLIP Text Encode.")
    check_number("cfg", cfg)
    if latent is None:
        return
    shape = getattr(latent.get("samples"), "shape", None) if isinstance(latent, dict) else None
    if shape is None or len(shape) < 3 or 0 in shape:
        raise InvalidSetting("latent_image", shape or latent, "connect the latent that the sampler gets.")


def _is_conditioning(entry: object) -> bool:
    """Whether `entry` is a conditioning of ComfyUI: (tensor or None, dict of options)."""
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[1], dict):
        return False
    return entry[0] is None or hasattr(entry[0], "shape")
