"""PyTorch leaves guards out by default; each setting that may do so has been judged, also those of a newer version.

A block of code runs with modules, attributes and methods that other nodes exchange between two calls. A guard that is not there
then means an old graph and a wrong image, without a word.
"""

import importlib
import re

import pytest

CONFIGS = "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.fx.experimental._config"
SUSPICIOUS = re.compile(r"(^|\.)skip_|guard|unsafe|assume_|specialize")

NO_GUARD = "it changes what is compiled or said, and leaves no guard out"
NOT_HERE = "for FSDP, TorchRec, export or precompiled code, which no ComfyUI has"
ANY = object()  # whatever the default is
# Setting -> (its default, what we do about it).
JUDGED = {
    "torch._dynamo.config.skip_guards_on_constant_func_defaults": (ANY, "session.py, COMPILE_SWITCHES"),
    "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags": (ANY, "session.py, COMPILE_SWITCHES"),
    "torch._dynamo.config.use_recursive_dict_tags_for_guards": (ANY, "session.py, COMPILE_SWITCHES"),
    "torch._dynamo.config.assume_static_by_default": (ANY, "session.py, STATIC and DYNAMIC"),
    "torch._dynamo.config.specialize_float": (ANY, "group.py, where numbers vary"),
    # Guards that are left out, or may be.
    "torch._dynamo.config.skip_nnmodule_hook_guards": (
        True,
        "blocks/state.py: a block with a hook in it runs eager; hooks for all modules are not noticed",
    ),
    "torch._dynamo.config.guard_nn_modules": (True, "modules are guarded"),
    "torch._dynamo.config.guard_nn_modules_using_dict_tags": (True, "more guards: of a module that is not inlined"),
    "torch._dynamo.config.assume_dunder_attributes_remain_unchanged": (True, "of the dict-tag shortcut, which is off"),
    "torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters": (
        True,
        "two parameters that become one: only a graph that writes into them would differ, and sampling writes into none",
    ),
    "torch._inductor.config.unsafe_skip_cache_dynamic_shape_guards": (False, "guards of graphs on disk are looked at"),
    "torch.fx.experimental._config.symbol_guard_limit_before_specialize": (
        None,
        "no limit: a size that varies goes on varying",
    ),
    "torch.fx.experimental._config.aggressive_guard_free_semantics": (0, "sizes that a graph depends on are guarded"),
    "torch._dynamo.config.prefer_deferred_runtime_asserts_over_guards": (False, "sizes that a graph depends on are guarded"),
    "torch._inductor.config.unsafe_skip_scalar_range_asserts": (False, "a graph checks the numbers that it read from tensors"),
    "torch._inductor.config.assume_aligned_inputs": (False, "as the example is aligned; partial_load.py places weights so"),
    "torch._inductor.config.assume_32bit_indexing": (False, "sizes that a graph depends on are guarded"),
    "torch.fx.experimental._config.meta_nonzero_assume_all_nonzero": (False, "counts of chosen tokens stay unknown"),
    # Others of these names.
    "torch._dynamo.config.use_lamba_guard_for_object_aliasing": (ANY, f"the same guard, in Python or C++: {NO_GUARD}"),
    "torch._dynamo.config.enable_cpp_symbolic_shape_guards": (False, f"the same guards in C++: {NO_GUARD}"),
    "torch._dynamo.config.enable_cpp_framelocals_guard_eval": (True, f"the same guards in C++: {NO_GUARD}"),
    "torch._dynamo.config.enable_cpp_guard_manager": (True, f"the same guards in C++: {NO_GUARD}"),
    "torch._dynamo.config.automatic_dynamic_exclusion_guard": (False, f"one guard more: {NO_GUARD}"),
    "torch._dynamo.config.specialize_int": (False, f"numbers are guarded either way: {NO_GUARD}"),
    "torch._dynamo.config.report_guard_failures": (True, NO_GUARD),
    "torch._dynamo.config.raise_on_unsafe_aot_autograd": (False, NO_GUARD),
    "torch._dynamo.config.skip_code_recursive_on_recompile_limit_hit": (True, NO_GUARD),
    "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint": (False, NO_GUARD),
    "torch._inductor.config.unsafe_ignore_unsupported_triton_autotune_args": (False, NO_GUARD),
    "torch._inductor.config.cpp.enable_unsafe_math_opt_flag": (False, NO_GUARD),
    "torch._inductor.config.assume_unaligned_fallback_output": (False, NO_GUARD),
    "torch._inductor.config.triton.skip_l1_cache": (False, NO_GUARD),
    "torch._inductor.config.triton.skip_cudagraph_warmup": (False, f"for PyTorch's CUDA graphs, which are off: {NO_GUARD}"),
    "torch._inductor.config.test_configs.assume_bucketing_reduces_latency": (True, NO_GUARD),
    "torch._inductor.config.cpp.enable_kernel_context_guard": (False, NO_GUARD),
    "torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access": (True, f"Dynamo switches it off: {NO_GUARD}"),
    "torch.fx.experimental._config.skip_dtype_check_in_meta_registrations": (False, NO_GUARD),
    "torch.fx.experimental._config.extended_debug_guard_added": (None, NO_GUARD),
    "torch._dynamo.config._unsafe_skip_fsdp_module_guards": (False, NOT_HERE),
    "torch._dynamo.config.skip_fsdp_guards": (True, NOT_HERE),
    "torch._dynamo.config.skip_fsdp_hooks": (True, NOT_HERE),
    "torch._dynamo.config.skip_torchrec": (True, NOT_HERE),
    "torch._functorch.config.unsafe_allow_optimization_of_collectives": (False, NOT_HERE),
    "torch._functorch.config.unsafe_treat_script_objects_as_zero_size": (False, NOT_HERE),
}


def settings():
    """The suspicious settings of this PyTorch, and their defaults; lists and dicts are no switches."""
    found = {}
    for name in CONFIGS:
        config = importlib.import_module(name)
        for key in config.get_config_copy():
            default = config._config[key].default
            if SUSPICIOUS.search(key) and not isinstance(default, list | dict):
                found[f"{name}.{key}"] = default
    return found


def test_each_setting_that_may_leave_a_guard_out_has_been_judged():
    assert settings().keys() - JUDGED.keys() == set(), "read what it does in PyTorch's source, and try it"


@pytest.mark.parametrize("name", JUDGED)
def test_the_default_is_the_one_that_was_judged(name):
    default, reason = JUDGED[name]
    if default is ANY or name not in settings():
        return
    assert settings()[name] == default, f"judged for the other value: {reason}"


def test_what_is_said_to_be_switched_is(engine):
    switches = engine("compile.session").COMPILE_SWITCHES
    for name, (_, reason) in JUDGED.items():
        if reason.endswith("COMPILE_SWITCHES"):
            assert switches[name.rpartition(".")[2]] is False, name
