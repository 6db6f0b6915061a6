"""Choose the tests of each part of the suite: for any ComfyUI, for newer versions, for each PyTorch, for Windows."""

# File below tests/ -> names of tests, with all parameters or one of them; (): all tests. Run in every ComfyUI, old or new.
CORE = {
    "host/model/test_integrity": (
        "test_keys_are_the_same_before_inside_and_after",
        "test_torch_settings_are_as_found",
        "test_the_same_seed_gives_the_same_image_with_and_without_warmup[flux-inductor-1.0]",
        "test_executing_again_and_changes_downstream_add_nothing",
    ),
    "host/weights/test_lora": (
        "test_merged_into_the_weights",
        "test_hooks_with_a_schedule",
        "test_object_patches_of_blocks_and_layers[double_blocks.0]",
    ),
    "host/weights/test_blocks": (
        "test_partial_loading_takes_the_graphs_of_full_loading",
        "test_lora_under_partial_loading_adds_no_graph",
        "test_paged_weights_take_one_graph_a_kind_whatever_is_resident[flux]",
        "test_lora_on_paged_weights_adds_no_graph",
        "test_an_error_in_a_block_leaves_paged_layers_as_found",
        "test_weights_are_spread_evenly_over_the_blocks",
    ),
}
MODELS = "flux", "wan", "qwen_image", "z_image", "sd3", "sdxl"
# Run with CORE on new versions: tests of features that newer versions have broken, or could break.
NEWEST = {
    "canaries/test_names": (),
    "canaries/test_objects": (),
    "canaries/test_guard_settings": (),
    "host/test_adapter": ("test_this_host_is_known", "test_the_host_fetches_no_block_ahead_that_we_fetch"),
    "host/model/test_models": (
        *(f"test_compiled_equals_eager_and_stays_warm[{name}-aot_eager]" for name in MODELS),
        "test_inductors_own_code_equals_eager",
    ),
    "host/model/test_background": (
        "test_images_go_on_until_the_code_is_there",
        "test_paged_weights_are_not_held_and_need_the_same_code",
        "test_the_warmup_waits_and_leaves_nothing_to_make",
    ),
    "host/graphs/test_replay": ("test_weights_that_stay_in_their_pages",),
    "host/nodes/test_prebuild": ("test_a_server_with_dynamic_vram_has_the_same_name_for_a_model",),
    "host/graphs/test_stale_graphs": ("test_equal_options_are_replayed_and_others_are_not",),
    "host/model/test_attention_choice": ("test_what_was_measured_is_used",),
    "host/model/test_controlnet": ("test_compiled_equals_eager_alone_and_behind_a_compiled_model[flux]",),
    "host/model/test_training": ("test_without_checkpointing_too",),
    "host/nodes/test_cache_files": ("test_the_second_process_reads_every_graph_from_disk",),
    "host/nodes/test_warmup": ("test_a_warm_size_takes_two_steps_and_compiles_nothing",),
    "host/weights/test_packed": (
        "test_unpacking_is_part_of_the_graph_one_for_each_kind",
        "test_a_lora_that_such_a_tensor_carries",
    ),
    "host/weights/test_quantized": ("test_no_breaks_and_the_hosts_result",),
    "host/weights/test_unpacking": (
        "test_a_forks_forward_is_called_and_each_way_of_packing_is_told_apart",
        "test_a_forks_get_weight_that_calls_its_parents_is_called_with_it",
    ),
    "engine/compile/test_group": ("test_shapes_in_auto_share_a_graph_and_a_batch_of_one_has_its_own",),
    "engine/inductor/test_backend": ("test_the_hosts_kernels_as_code",),
    "engine/inductor/test_dynamic_sizes": ("test_whether_a_number_is_among_numbers_that_vary",),
    "engine/inductor/test_persistent_reductions": (),
    "engine/test_torch_settings": (),
    "server/test_nodes": ("test_image_is_the_same_with_and_without_the_nodes",),
}
# Tests, without a model of ComfyUI, of features that another PyTorch can break; run in minutes with each version of users.
PYTORCH = ["tests/canaries", "tests/engine/compile", "tests/engine/inductor", "tests/engine/test_torch_settings.py"]
# Windows in CI has no C++ compiler on its path, no Triton, and PyTorch's build for CPUs: rooms that need none of these, ...
WINDOWS = [
    *("tests/engine/background", "tests/engine/benchmark", "tests/engine/blocks", "tests/engine/cache", "tests/engine/compile"),
    *("tests/engine/failures", "tests/engine/messages", "tests/engine/transformer_options"),
    "tests/engine/test_files.py",
    "tests/engine/test_settings.py",
    "tests/engine/test_user_input.py",
    "tests/host/nodes/test_users_cache_files.py::test_a_name_of_a_device_of_windows_is_refused",
]
# ... less the tests in them that do.
NOT_ON_WINDOWS = [
    "tests/engine/cache/test_fleet.py",
    "tests/engine/compile/test_group.py::test_every_backend_that_a_cpu_can_run",
    "tests/engine/compile/test_group.py::test_random_numbers_are_those_of_eager",
    "tests/engine/compile/test_group.py::test_what_pytorch_compiled_for_a_freed_model_is_freed",
    "tests/engine/failures/test_preflight.py::test_this_machine_can_compile",
]


def tests_of(chosen):
    """Arguments of pytest for the tests of CORE or NEWEST."""
    files = [(f"tests/{file}.py", names) for file, names in chosen.items()]
    return [f"{file}::{name}" for file, names in files for name in names] + [file for file, names in files if not names]


def arguments(part):
    """Arguments of pytest for a part: "whole", "first", "rest", "core", "newest", "pytorch" or "windows"."""
    if part == "whole":
        return []
    if part in ("first", "rest"):
        return ["-m", "rest" if part == "rest" else "not rest"]
    if part == "pytorch":
        return PYTORCH
    if part == "windows":
        return [*WINDOWS, *(f"--deselect={test}" for test in NOT_ON_WINDOWS)]
    if part == "newest":
        # The test that renames each name takes minutes; it is in "rest", and in "pytorch" for each PyTorch.
        renames = "tests/canaries/test_names.py::test_with_any_private_name_renamed_an_image_comes_out"
        return [*tests_of({**CORE, **NEWEST}), f"--deselect={renames}"]
    return tests_of(CORE)
