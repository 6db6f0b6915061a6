"""The private names of PyTorch and the names of ComfyUI that the pack uses, and how it uses them.

`test_names.py` has a test for each, and one that finds a use in the pack's code that is not listed here. A name of which only
some versions have is listed with them: without it the pack does something else, which is said beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """How the pack uses a name.

    Args:
        given: we call it, by another name in the code, with so many arguments.
        by_name: and with these, by their names.
        takes: we put a function with these first parameters in its place, or are called with them.
        since, until: the first and the last version that has it, of PyTorch or, for a name of ComfyUI, of ComfyUI.
    """

    given: int | None = None
    by_name: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True)
class Foreign:
    """Where an attribute comes from, and which versions have it, as in `Use`."""

    owner: str
    since: str | None = None
    until: str | None = None


def called(given=0, *by_name, **versions):
    return Use(given, by_name, **versions)


def replaced(*takes, **versions):
    return Use(takes=takes, **versions)


READ = Use()

# What the pack has of an object is looked for in its class: an attribute of it, or what its methods give `self`.
INSTANCES = {
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
    "comfy.model_patcher.ModelPatcher.<computed>": ("detach", "partially_unload"),
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

TORCH = {
    # What has been compiled of a function, and when.
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": READ,  # without it, a warmup notices no reset
    "torch._C._dynamo.eval_frame.reset_code": READ,
    "torch._dynamo.callback.callback_handler.register_start_callback": READ,
    "torch._dynamo.callback.callback_handler.register_end_callback": READ,
    "torch._dynamo.callback.callback_handler.start_callbacks": READ,
    "torch._dynamo.callback.callback_handler.end_callbacks": READ,
    "torch._dynamo.convert_frame.compile_lock.acquire": READ,
    "torch._dynamo.utils.counters": READ,
    "torch._dynamo.utils.get_compilation_metrics": READ,
    "torch._dynamo.eval_frame.OptimizedModule": READ,
    "torch._dynamo.lookup_backend": READ,
    "torch._dynamo.run": READ,
    "torch._dynamo.exc.FailOnRecompileLimitHit": READ,
    "torch.utils.checkpoint._StopRecomputationError": READ,
    # Settings; one that is missing is not set.
    "torch._dynamo.config.patch": READ,
    "torch._dynamo.config.accumulated_recompile_limit": READ,
    "torch._dynamo.config.assume_static_by_default": READ,
    "torch._dynamo.config.automatic_dynamic_shapes": READ,
    "torch._dynamo.config.capture_dynamic_output_shape_ops": READ,
    "torch._dynamo.config.capture_scalar_outputs": READ,
    "torch._dynamo.config.fail_on_recompile_limit_hit": READ,
    "torch._dynamo.config.fake_tensor_cache_enabled": READ,
    "torch._dynamo.config.recompile_limit": READ,
    "torch._dynamo.config.specialize_float": READ,
    "torch._dynamo.config.suppress_errors": READ,
    "torch._dynamo.config.error_on_recompile": READ,
    "torch._dynamo.config.inline_inbuilt_nn_modules": READ,
    "torch._dynamo.config.install_free_tensors": READ,
    "torch._dynamo.config.prepare_freezing": READ,
    "torch._dynamo.config.allow_unspec_int_on_nn_module": READ,
    "torch._guards.detect_fake_mode": called(1),
    "torch._guards.tracing": called(1),
    "torch._guards.TracingContext": called(1),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": called(1),
    "torch._dynamo.config.use_recursive_dict_tags_for_guards": READ,
    "torch._dynamo.config.skip_guards_on_constant_func_defaults": READ,
    "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags": READ,
    "torch._functorch.config.force_non_lazy_backward_lowering": Use(since="2.10"),  # before, it is as if it were off
    "torch._inductor.config.freezing": READ,
    "torch._inductor.config.triton.persistent_reductions": READ,
    "torch._inductor.config.unsafe_marked_cacheable_functions": READ,
    "torch._inductor.config.triton.cudagraphs": READ,
    "torch._inductor.config.patch": READ,
    "torch._inductor.list_mode_options": READ,
    "torch.fx.experimental._config.use_duck_shape": READ,
    # What Dynamo traces in another way than it would: whether something is in a list of numbers that vary.
    "torch._dynamo.variables.lists.iter_contains": replaced("items", "search", "tx"),
    # What `sdpa_kernel` puts into a graph.
    "torch.nn.attention._sdpa_kernel": READ,
    "torch.nn.attention._backend_from_string": READ,
    # What Dynamo asks for a line of a debug log.
    "torch._dynamo.symbolic_convert.get_funcname": replaced("filename", "lineno"),
    # Whether it takes a break for one in a loop.
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.maybe_has_backedge": replaced("self"),
    "torch._dynamo.guards.profile_guard_manager": READ,
    "torch._dynamo.variables.VariableTracker.build": READ,
    "torch._dynamo.variables.BaseListVariable": READ,
    "torch._dynamo.variables.SymNodeVariable": READ,
    "torch._dynamo.variables.TupleVariable": READ,
    # Inductor.
    "torch._inductor.compile_fx.compile_fx": READ,
    "torch._inductor.compile_fx.select_decomp_table": called(),
    "torch._inductor.decomposition.select_decomp_table": READ,
    "torch._inductor.choices.InductorChoices.should_use_persistent_reduction": replaced("features", "cooperative_reduction"),
    "torch._inductor.runtime.hints.ReductionHint.INNER": READ,
    "torch._inductor.virtualized.V.choices": READ,
    "torch._inductor.virtualized.V.set_choices_handler": READ,
    "torch._inductor.virtualized.V.graph.current_device": READ,
    "torch._inductor.virtualized.V.graph.sizevars.statically_known_leq": READ,
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.run": called(3, "stream"),
    "triton.backends.nvidia.driver.CudaLauncher.__call__": called(10),
    "torch._inductor.runtime.cache_dir_utils.cache_dir": READ,
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": READ,
    "torch._ops.OpOverload": READ,
    "torch._ops.OpOverloadPacket": READ,
    "torch._ops.HigherOrderOperator": READ,
    # Processes that compile kernels.
    "torch._inductor.async_compile.maybe_warm_pool": called(),
    # A graph for another process, and what comes back.
    "torch._dispatch.python.enable_python_dispatcher": called(),
    "torch._dynamo.source.ConstantSource": called(1),
    "torch._functorch.config.bundled_autograd_cache": READ,
    "torch._functorch.config.strict_autograd_cache": READ,
    "torch._inductor.codecache.CppPythonBindingsCodeCache.cache.clear": called(0),
    "torch._inductor.standalone_compile.AOTCompiledArtifact": called(1),
    "torch._inductor.standalone_compile.AOTCompiledArtifact.deserialize": called(1),
    "torch._functorch._aot_autograd.autograd_cache": READ,  # imported ahead
    "torch._inductor.graph": READ,
    "torch._subclasses.fake_tensor.FakeTensorMode": called(0, "shape_env"),
    "torch._subclasses.fake_tensor.init_gpu_context": replaced(),
    "torch.fx.Node._pretty_print_target": called(1),
    "torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC": READ,
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": called(),
    "torch.nn.attention._cur_sdpa_kernel_backends": called(),
    "torch.overrides._get_current_function_mode_stack": called(),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": called(),
    "torch.utils._sympy.numbers.int_oo": READ,
    # The rest.
    "torch.cuda._sleep": READ,
    "torch.utils._pytree.tree_flatten": READ,
    "torch.utils._pytree.tree_leaves": READ,
    "torch.utils._pytree.tree_map": READ,
    "torch.utils._pytree.tree_map_only": READ,
    "torch.utils._pytree.tree_unflatten": READ,
    "torch.utils._triton._extern_libs_key": Use(since="2.12"),  # before, a graph on disk does not depend on libdevice
    "torch.xpu._is_compiled": READ,
    "triton.knobs.nvidia": READ,
}

HOST = {
    "comfy.cli_args.args.disable_comfy_compiler": Use(since="0.34"),  # before, ComfyUI has no compiler of its own
    "comfy.controlnet.ControlBase": READ,
    "comfy.ldm.modules.attention.attention_split": READ,
    "comfy.ldm.modules.attention.attention_sub_quad": READ,
    "comfy.ldm.modules.attention.optimized_attention.__name__": READ,
    "comfy.memory_management.aimdo_enabled": READ,
    "comfy.model_management.InterruptProcessingException": READ,
    "comfy.model_management.NUM_STREAMS": READ,
    "comfy.model_management.current_stream": READ,
    "comfy.model_management.lora_compute_dtype": called(1),
    "comfy.model_management.get_free_memory": READ,
    "comfy.model_management.get_offload_stream": replaced("device"),
    "comfy.model_management.get_torch_device": READ,
    "comfy.model_management.get_torch_device_name": called(1),
    "comfy.model_management.get_total_memory": READ,
    "comfy.model_management.intermediate_device": READ,
    "comfy.model_management.minimum_inference_memory": READ,
    "comfy.model_management.module_size": READ,
    "comfy.model_management.sync_stream": replaced("device", "stream"),
    "comfy.model_management.throw_exception_if_processing_interrupted": READ,
    "comfy.model_patcher.create_model_options_clone": called(1),
    "comfy.model_patcher.ModelPatcher.detach": replaced("self", "unpatch_all"),
    "comfy.model_patcher.ModelPatcher._load_list": replaced("self", "for_dynamic"),
    "comfy.model_patcher.ModelPatcherDynamic": READ,
    "comfy.model_prefetch.cleanup_prefetched_modules": (
        replaced("comfy_modules", until="0.32"),
        replaced("module", "comfy_modules", since="0.33"),
    ),
    "comfy.ops.QuantizedTensor": READ,
    "comfy.ops.fp8_ops.Linear": READ,
    "comfy.ops.cast_bias_weight": replaced("s", "input", "dtype", "device", "bias_dtype"),
    "comfy.ops.cast_modules_with_vbar": replaced("comfy_modules", "dtype", "device", "bias_dtype", "non_blocking"),
    "comfy.ops.resolve_cast_module_with_vbar": replaced("s", "dtype", "device", "bias_dtype", "compute_dtype", "want_requant"),
    "comfy.patcher_extension.CallbacksMP.ON_CLEANUP": READ,
    "comfy.patcher_extension.add_wrapper_with_key": called(4, "is_model_options"),
    "comfy.quant_ops": READ,
    "comfy.patcher_extension.CallbacksMP.ON_CLONE": READ,
    "comfy.patcher_extension.CallbacksMP.ON_DETACH": READ,
    "comfy.patcher_extension.CallbacksMP.ON_LOAD": READ,
    "comfy.patcher_extension.CallbacksMP.ON_PRE_RUN": READ,
    "comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE": READ,
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL": READ,
    "comfy.patcher_extension.WrappersMP.CALC_COND_BATCH": READ,
    "comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL": READ,
    "comfy.patcher_extension.WrappersMP.PREDICT_NOISE": READ,
    "comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING": READ,
    "comfy.sample.fix_empty_latent_channels": READ,
    "comfy.sample.prepare_noise": READ,
    "comfy.sample.sample_custom": READ,
    "comfy.samplers.KSAMPLER.sample": replaced(
        "self", "model_wrap", "sigmas", "extra_args", "callback", "noise", "latent_image"
    ),
    "comfy.samplers.KSamplerX0Inpaint": called(2),
    "comfy.samplers.Sampler": READ,
    "comfy.samplers.calculate_sigmas": READ,
    "comfy.samplers.sampler_object": READ,
    "comfy.utils.ProgressBar": READ,
    "comfy.utils.load_torch_file": replaced("ckpt", "safe_load", "device", "return_metadata"),
    "comfy.utils.set_attr": called(3),
    "comfy_aimdo.model_vbar.vbar_fault": READ,
    "comfy_aimdo.model_vbar.vbar_signature_compare": READ,
    "comfy_aimdo.model_vbar.vbar_unpin": READ,
    "comfy_kitchen.registry.BackendRegistry.get_implementation": replaced("self", "func_name", "backend", "kwargs"),
    "comfy_kitchen.registry.registry": READ,
    "comfy_api.latest.ComfyExtension": READ,
    "comfy_api.latest.io.ComfyNode": READ,
    "comfy_api.latest.io.Boolean.Input": READ,
    "comfy_api.latest.io.Clip.Input": READ,
    "comfy_api.latest.io.Combo.Input": READ,
    "comfy_api.latest.io.Conditioning.Input": READ,
    "comfy_api.latest.io.ControlNet.Input": READ,
    "comfy_api.latest.io.ControlNet.Output": READ,
    "comfy_api.latest.io.Float.Input": READ,
    "comfy_api.latest.io.Hidden.unique_id": READ,
    "comfy_api.latest.io.Int.Input": READ,
    "comfy_api.latest.io.Latent.Input": READ,
    "comfy_api.latest.io.Model.Input": READ,
    "comfy_api.latest.io.Model.Output": READ,
    "comfy_api.latest.io.NodeOutput": READ,
    "comfy_api.latest.io.Schema": READ,
    "comfy_api.latest.io.String.Input": READ,
    "comfy_api.latest.io.String.Output": READ,
    "comfy_api.latest.io.Vae.Input": READ,
    "comfy_api.latest.io.Vae.Output": READ,
    "comfyui_version.__version__": READ,
    "folder_paths.get_filename_list": READ,
    "folder_paths.get_full_path": READ,
    "folder_paths.get_output_directory": READ,
    "folder_paths.get_save_image_path": READ,
    "folder_paths.get_user_directory": READ,
    "server.PromptServer.instance.add_on_prompt_handler": READ,
    "server.PromptServer.instance.loop.call_later": READ,
    "server.PromptServer.instance.loop.call_soon": READ,
    "server.PromptServer.instance.loop.run_in_executor": READ,
    "server.PromptServer.instance.prompt_queue.currently_running": READ,
    "server.PromptServer.instance.prompt_queue.get_tasks_remaining": READ,
    "server.PromptServer.instance.routes.get": READ,
    "server.PromptServer.instance.send_sync": READ,
    # What calls our wrappers and callbacks, and with what.
    "comfy.model_base.BaseModel.apply_model": replaced(
        "self", "x", "t", "c_concat", "c_crossattn", "control", "transformer_options"
    ),
    "comfy.sampler_helpers.prepare_sampling": replaced("model", "noise_shape", "conds"),
}

# Attributes of what the pack calls a patcher; the host's class has them, or gives them to `self`.
PATCHER = {
    "set_attachments": called(2),
    "clone": READ,
    "model": READ,
    "model_options": READ,
    "object_patches_backup": READ,
    "object_patches": READ,
    "load_device": READ,
    "offload_device": READ,
    "model_size": READ,
    "loaded_size": READ,
    "partially_unload": READ,
    "get_model_object": READ,
    "add_object_patch": READ,
    "add_wrapper_with_key": READ,
    "get_attachment": READ,
    "get_wrappers": READ,
    "get_all_wrappers": called(1),
    "wrappers": READ,
    "remove_wrappers_with_key": READ,
    "add_callback_with_key": READ,
    "remove_callbacks_with_key": READ,
    "is_dynamic": READ,
}

# Attributes that begin with `_` and are not the pack's own: the class or module that has it, or in whose code it stands.
FOREIGN = {
    "_base": Foreign("torch.Tensor"),
    "_is_view": Foreign("torch.Tensor"),
    "_buffers": Foreign("torch.nn.Module"),
    "_parameters": Foreign("torch.nn.Module"),
    "_compiled_call_impl": Foreign("torch.nn.Module"),
    "_forward_hooks": Foreign("torch.nn.Module"),
    "_forward_pre_hooks": Foreign("torch.nn.Module"),
    "_dynamo_static_indices": Foreign("torch._dynamo.decorators"),
    "_has_dynamo_dim_marking": Foreign("torch._dynamo.decorators", since="2.13"),
    "_schema": Foreign("torch._ops.OpOverload"),
    "_orig_mod": Foreign("torch._dynamo.eval_frame"),
    "_torchdynamo_orig_callable": Foreign("torch._dynamo.eval_frame"),
    "_torchdynamo_wrapper_id": Foreign("torch._dynamo.eval_frame", since="2.11"),
    "_full_precision_mm": Foreign("comfy.ops"),
    "_forward": Foreign("comfy.ldm.flux.model.Flux"),  # the `forward` of a model without the wrappers
    "_prefetch": Foreign("comfy.ops"),
    "_v": Foreign("comfy.ops"),
    "_v_signature": Foreign("comfy.ops"),
    "_v_weight": Foreign("comfy.ops"),
    "_v_bias": Foreign("comfy.ops"),
    "_pin_state": Foreign("comfy.model_patcher"),
    "_pins": Foreign("comfy.model_patcher"),
    "_v_block": Foreign("comfy.model_prefetch", since="0.33"),
    "_comfy_graph": Foreign("comfy.model_prefetch", since="0.33"),
    "_asdict": Foreign("collections"),
    "_cdata": Foreign("torch.UntypedStorage"),
    "_exit": Foreign("os"),
    "_fields": Foreign("collections"),
    "_call_impl": Foreign("torch.nn.Module"),
    "_wrapped_call_impl": Foreign("torch.nn.Module"),
}
# Strings of the pack's own that look like such an attribute.
OWN_STRINGS = {"_repaired", "_linear", "_ATTENTION", "_parameters_", "_buffers_", "_global_forward"}
