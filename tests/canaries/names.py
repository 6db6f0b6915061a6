"""How the pack uses private names of PyTorch and names of ComfyUI, where its code does not say so.

`test_names.py` finds the names in the pack's code and has a test for each: it is there, and takes what visible calls give it.
Listed here is what more a name must do. A name that only some versions have is listed with them: without it the pack does
something else, which is said beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """How the pack uses a name, beside the calls that its code shows.

    Args:
        given: it is called with so many arguments.
        by_name: and with these, by their names.
        takes: we put a function with these first parameters in its place, or are called with them.
        since, until: the first and the last version that has it, of PyTorch or, for a name of ComfyUI, of ComfyUI.
    """

    given: int | None = None
    by_name: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None


def called(given=0, *by_name, **versions):
    return Use(given, by_name, **versions)


def replaced(*takes, **versions):
    return Use(takes=takes, **versions)


READ = Use()

# What the pack has of an object is looked for in its class: an attribute of it, or what its methods give `self`.
INSTANCES = {
    "server.PromptServer.instance.app.on_startup": "aiosignal.Signal",
    "server.PromptServer.instance.loop": "asyncio.AbstractEventLoop",
    "server.PromptServer.instance.prompt_queue": "execution.PromptQueue",
    "server.PromptServer.instance.routes": "aiohttp.web.RouteTableDef",
    "server.PromptServer.instance": "server.PromptServer",
    "torch._inductor.virtualized.V.graph.sizevars": "torch._inductor.sizevars.SizeVarAllocator",
    "torch._inductor.virtualized.V.graph": "torch._inductor.graph.GraphLowering",
}

# Names that are put together when the pack runs: `getattr(module, f"vbar_{name}")`.
COMPUTED = {
    "torch._inductor.config.<computed>": ("emulate_precision_casts",),
    "comfy.model_management.<computed>": (
        *("get_free_memory", "minimum_inference_memory", "module_size"),
        *("get_offload_stream", "current_stream"),
    ),
    "comfy_aimdo.model_vbar.<computed>": ("vbar_fault", "vbar_unpin", "vbar_signature_compare"),
    "comfy_kitchen.backends.eager.<computed>": ("int8_linear",),
    "torch.utils._sympy.functions.<computed>": (
        *("FloorDiv", "ModularIndexing", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "Max", "Min", "PowByNatural"),
    ),
    "torch.ops.comfy_kitchen.<computed>": (
        *("apply_rope1", "apply_rope", "apply_rope_split_half1", "apply_rope_split_half"),
        *("rms_rope1", "rms_rope", "rms_rope_split_half1", "rms_rope_split_half"),
        *("adaln", "rms_adaln"),
    ),
}
# What reads like a name and is none.
NO_NAMES = {"comfy.settings.json"}

USES = {
    # What Dynamo traces in another way than it would: whether something is in a list of numbers that vary.
    "torch._dynamo.variables.lists.iter_contains": replaced("items", "search", "tx"),
    # What Dynamo asks for a line of a debug log.
    "torch._dynamo.symbolic_convert.get_funcname": replaced("filename", "lineno"),
    # Whether it takes a break for one in a loop.
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.maybe_has_backedge": replaced("self"),
    "torch._functorch.config.force_non_lazy_backward_lowering": Use(since="2.10"),  # before, it is as if it were off
    "torch._inductor.choices.InductorChoices.should_use_persistent_reduction": replaced("features", "cooperative_reduction"),
    "torch._inductor.compile_fx.select_decomp_table": called(),
    # Before, there are no artefacts, and graphs are lowered in the call that traces them.
    "torch._inductor.standalone_compile.AOTCompiledArtifact": Use(since="2.10"),
    "torch._inductor.standalone_compile.AOTCompiledArtifact.deserialize": Use(since="2.10"),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.run": called(3, "stream"),
    "torch._subclasses.fake_tensor.init_gpu_context": replaced(),
    # 2.15 guards what is read from a class itself; which version before that began to is not known.
    "torch._dynamo.variables.user_defined.UserDefinedClassVariable.var_getattr": Use(until="2.14"),
    "torch.utils._triton._extern_libs_key": Use(since="2.12"),  # before, a graph on disk does not depend on libdevice
    "triton.backends.nvidia.driver.CudaLauncher.__call__": called(10),
    "comfy.cli_args.args.disable_comfy_compiler": Use(since="0.34"),  # before, ComfyUI has no compiler of its own
    "comfy.model_management.get_offload_stream": replaced("device"),
    "comfy.model_management.sync_stream": replaced("device", "stream"),
    "comfy.model_patcher.ModelPatcher.detach": replaced("self", "unpatch_all"),
    "comfy.model_patcher.ModelPatcher._load_list": replaced("self", "for_dynamic"),
    "comfy.model_prefetch.cleanup_prefetched_modules": (
        replaced("comfy_modules", until="0.32"),
        replaced("module", "comfy_modules", since="0.33"),
    ),
    "comfy.ops.cast_bias_weight": replaced("s", "input", "dtype", "device", "bias_dtype"),
    "comfy.ops.cast_modules_with_vbar": replaced("comfy_modules", "dtype", "device", "bias_dtype", "non_blocking"),
    "comfy.ops.resolve_cast_module_with_vbar": replaced("s", "dtype", "device", "bias_dtype", "compute_dtype", "want_requant"),
    "comfy.samplers.KSAMPLER.sample": replaced(
        "self", "model_wrap", "sigmas", "extra_args", "callback", "noise", "latent_image"
    ),
    "comfy.utils.load_torch_file": replaced("ckpt", "safe_load", "device", "return_metadata"),
    "comfy_kitchen.registry.BackendRegistry.get_implementation": replaced("self", "func_name", "backend", "kwargs"),
}
# What calls our wrappers and callbacks, and with what; no code of ours names it.
CALLERS = {
    "comfy.model_base.BaseModel.apply_model": replaced(
        "self", "x", "t", "c_concat", "c_crossattn", "control", "transformer_options"
    ),
    "comfy.sampler_helpers.prepare_sampling": replaced("model", "noise_shape", "conds"),
}

# Attributes of patchers under dynamic VRAM alone.
DYNAMIC = {"get_non_dynamic_delegate", "non_dynamic_delegate_model"}

# Attributes that begin with `_` and are not the pack's own: the class or module that has them, or in whose code they stand.
FOREIGN = {
    "torch.Tensor": "_base _is_view",
    "torch.UntypedStorage": "_cdata",
    "torch.nn.Module": """_buffers _parameters _compiled_call_impl _forward_hooks _forward_pre_hooks _call_impl
        _wrapped_call_impl""",
    "torch._dynamo.decorators": "_dynamo_static_indices _has_dynamo_dim_marking",
    "torch._dynamo.eval_frame": "_orig_mod _torchdynamo_orig_callable _torchdynamo_wrapper_id",
    "torch._dynamo.metrics_context": "_edits",
    "torch._ops.OpOverload": "_schema",
    "torch.library.Library": "_destroy",
    "comfy.ops": "_full_precision_mm _prefetch _v _v_signature _v_weight _v_bias",
    "comfy.ldm.flux.model.Flux": "_forward",  # the `forward` of a model without the wrappers
    "comfy.model_patcher": "_pin_state _pins",
    "comfy.model_prefetch": "_v_block _comfy_graph",
    "collections": "_asdict _fields",
    "os": "_exit",
}
FOREIGN_SINCE = {
    "_has_dynamo_dim_marking": "2.13",
    "_torchdynamo_wrapper_id": "2.11",
    "_v_block": "0.33",
    "_comfy_graph": "0.33",
}
# Strings of the pack's own that look like such an attribute.
OWN_STRINGS = {"_repaired", "_linear", "_ATTENTION", "_parameters_", "_buffers_", "_global_forward"}
