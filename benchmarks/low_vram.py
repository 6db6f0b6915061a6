"""Measure steps of a model with less memory free than it needs."""

from pathlib import Path

import torch

from . import host, models


def load_from_file(name: str):
    """As UNETLoader does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(models.weights_file(name)))


class Ballast:
    """Plain allocations, as another program makes them; made before the model, whose own memory is what it must do with."""

    def __init__(self):
        self._blocks = []
        self._free_at_first = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def leave(self, gib: float) -> None:
        """Take memory until so much is left for the model; 0 takes none."""
        if gib:
            torch.cuda.empty_cache()
            wanted = int(self._free_at_first - gib * host.GIB) - self.size()
            self._blocks.append(torch.empty(wanted, dtype=torch.uint8, device="cuda"))

    def size(self) -> int:
        return sum(block.nbytes for block in self._blocks)


def low_vram_jobs(options) -> list[dict]:
    """A process a variant and kind of VRAM management; partial loading has one amount. Core's node cannot do with that."""
    variants = [(variant, variant, {}) for variant in ("eager", "core", "kjnodes", "ours") if variant in options.variants]
    if "ours" in options.variants:
        variants.insert(-1, ("ours", "ours, same attention", {"attention": "comfyui"}))
    return [
        {"model": model, "vram": vram, "variants": [variant], "label": label, "settings": settings, "free": free}
        for model in options.models
        for vram, free in (("dynamic", options.free), ("legacy", [14]))
        for variant, label, settings in variants
        if not (vram == "legacy" and variant == "core")
    ]


def low_vram(options):
    """Steps with less and less memory free, for one variant."""
    import comfy.model_management

    ballast, (variant,) = Ballast(), options.variants
    model = host.apply(variant, load_from_file(options.model), options.kjnodes, **options.settings)
    reference = Path(options.scratch) / f"{options.model}.pt"
    for free in options.free:
        if free and not model.is_dynamic():  # nothing but the host's loader gives its memory back
            comfy.model_management.unload_all_models()
        ballast.leave(free)
        row, again = {"variant": options.label, "vram": options.vram, "free_gib": free}, {}
        with host.noted(row):
            row["first_step"] = host.sample(model, options.model, options.steps)[1][0]
        if "died" not in row:
            with host.noted(again):
                latent, seconds = host.sample(model, options.model, options.steps)
                row |= {"step": host.median(seconds[1:]), "steps": seconds}
                left, total = torch.cuda.mem_get_info()
                row["used_gib"] = (total - left - ballast.size()) / host.GIB
                if variant == "eager" and not reference.exists():
                    torch.save(latent, reference)
                if reference.exists():
                    row["error"] = host.relative_error(latent, torch.load(reference))
            row |= {"graphs_in_second_run": again["graphs"]} | {k: v for k, v in again.items() if k == "died"}
        yield row
        if "died" in row:
            return
