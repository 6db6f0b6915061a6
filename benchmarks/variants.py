"""The ways to run a model that are compared: eager, core's node, KJNodes' node, and ours.

Peers run their own code: core's from the host, KJNodes' from a file named by `--kjnodes`
(its nodes/model_optimization_nodes.py).
"""

import ast
import logging
from pathlib import Path

VARIANTS = ("eager", "core", "kjnodes", "ours")


def apply(variant: str, patcher, kit, kjnodes: str | None = None, **settings):
    """A patcher that runs as `variant` does.

    Args:
        kit: our package, for `ours`.
        kjnodes: path of KJNodes' file, for `kjnodes`.
        settings: inputs of Torch Compile Model, for `ours`.
    """
    if variant == "eager":
        return patcher.clone()
    if variant == "core":
        return _core(patcher)
    if variant == "kjnodes":
        return _kjnodes(patcher, kjnodes)
    from importlib import import_module

    compile_settings = import_module(f"{kit}.engine.settings").CompileSettings(**settings)
    return import_module(f"{kit}.engine.host.model.attach").attach(patcher, compile_settings)


def _core(patcher):
    """What comfy_extras/nodes_torch_compile.py does."""
    from comfy_api.torch_helpers.torch_compile import set_torch_compile_wrapper

    def without_options(entries):
        return ["transformer_options" not in entry.name for entry in entries]

    clone = patcher.clone(disable_dynamic=True) if patcher.is_dynamic() else patcher.clone()
    set_torch_compile_wrapper(clone, backend="inductor", options={"guard_filter_fn": without_options})
    return clone


def _kjnodes(patcher, file: str):
    """TorchCompileModelAdvanced with its defaults."""
    wanted = {
        "patch_aimdo_for_compile", "skip_torch_compile_dict", "build_compile_kwargs", "_kj_apply_torch_compile_wrapper",
        "kj_set_torch_compile_wrapper", "TorchCompileModelAdvanced",
    }  # fmt: skip
    node = _of_kjnodes(file, wanted)["TorchCompileModelAdvanced"]()
    (model,) = node.patch(patcher, "inductor", False, "default", "false", 64, True, False)
    return model


def kjnodes_vae(vae, file: str):
    """TorchCompileVAE with its defaults, but for the encoder, which stays as it is."""
    (vae,) = _of_kjnodes(file, {"TorchCompileVAE"})["TorchCompileVAE"]().compile(vae, "inductor", "default", False, False, True)
    return vae


def _of_kjnodes(file: str, wanted: set[str]) -> dict:
    """Only these definitions of the file are run, the rest needs other packs."""
    tree = ast.parse(Path(file).read_text())
    body = []
    for node in tree.body:
        named = getattr(node, "name", None) in wanted
        assigned = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in (
            "_aimdo_patched", "_KJ_COMPILE_KEY", "_KJ_COMPILED_BY_MODEL"
        )  # fmt: skip
        imported = isinstance(node, ast.Import) and any(a.asname == "_kj_weakref" for a in node.names)
        if named or assigned or imported:
            body.append(node)
    import comfy.ops
    import comfy.patcher_extension
    import comfy.utils
    import torch

    space = {"torch": torch, "comfy": comfy, "logging": logging}
    exec(compile(ast.Module(body, []), file, "exec"), space)  # noqa: S102  the peer's own code
    return space
