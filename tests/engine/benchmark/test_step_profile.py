"""Where the time of a step goes: events of PyTorch's profiler, by name and by when they ran."""

import json

import pytest
import torch

KERNELS = {  # of H200 and AMD cards
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(Params)": "products",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams)": "products",
    "triton_tem_fused_addmm_relu_3": "products",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_MI16x16x16x1": "products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t> >(Flash_fwd_params)": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128_4x1x1_kernel0_0": "attention",
    "void qk_int_sv_f16_attn_kernel<128u, 64u, 32u, 64u, 128u>(signed char*)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_poi_fused__scaled_dot_product_flash_attention_mm_0": "fused",
    "triton_red_fused_add_addmm_native_layer_norm_2": "fused",
    "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32": "convolutions",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half>(nchw2nhwc_params_t)": "convolutions",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>(int)": "other",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int)": "other",
    "aten::addmm": "products",
    "aten::mm": "products",
    "aten::linear": "products",
    "aten::scaled_dot_product_attention": "attention",
    "aten::mkldnn_convolution": "convolutions",
    "aten::upsample_bilinear2d": "other",
    "aten::native_layer_norm": "other",
    "aten::convert_element_type": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_operators_are_told_apart_by_their_names(engine, name):
    assert engine("benchmark.step_profile").kind_of(name) == KERNELS[name]


GEMM, FLASH = "nvjet_sm90_tst", "flash_fwd_kernel"


def event(name, start, seconds, cat="kernel", tid=7, **args):
    """An event as in a Chrome trace, whose times are microseconds."""
    return {"ph": "X", "name": name, "cat": cat, "ts": start * 1e6, "dur": seconds * 1e6, "tid": tid, "args": args}


@pytest.fixture
def profiled(engine):
    """profiled(events): where the time goes in a step from 10 to 20 s."""
    module = engine("benchmark.step_profile")
    step = event("ProfilerStep#1", 10, 10, "user_annotation")
    return lambda *events: module.profile_of([*events, step])


def rounded(seconds):
    return {kind: round(value, 3) for kind, value in seconds.items() if value}


def test_each_moment_of_a_gpu_counts_once_and_gaps_are_waiting(profiled):
    found = profiled(
        event(GEMM, 11, 3),
        event(FLASH, 13, 2, tid=8),  # one of these seconds beside the product
        event("Memcpy HtoD (Pinned -> Device)", 12, 5, "gpu_memcpy", bytes=8_000_000_000),  # two of them alone
        event("Memcpy DtoD (Device -> Device)", 18, 0.5, "gpu_memcpy", bytes=5),
        event("ProfilerStep#1", 11, 7, "gpu_user_annotation"),
        event("aten::mm", 10, 9, "cpu_op"),
    )
    assert rounded(found.seconds) == {"products": 3, "attention": 1, "transfers": 2, "other": 0.5, "waiting": 3.5}
    assert (found.span, found.transferring, found.transferred) == (10, 5, 8_000_000_000) and found.on_gpu


def test_the_profiler_makes_waiting_longer_and_the_step_without_it_does_not(profiled):
    found = profiled(event(GEMM, 11, 4))
    assert rounded(found.of_step(5)) == {"products": 4, "waiting": 1}
    assert rounded(found.of_step(2)) == {"products": 2}


def test_transfers_that_never_pause_take_the_whole_step(profiled):
    found = profiled(
        event(GEMM, 11, 5),
        event("Memcpy HtoD (Pinned -> Device)", 10.5, 9, "gpu_memcpy", bytes=10),
    )
    parts = found.of_step(10)
    assert max(parts, key=parts.get) == "transfers" and parts["transfers"] == pytest.approx(9)


def test_while_the_cpu_copies_the_gpu_waits_for_a_transfer(profiled):
    found = profiled(
        event("cudaMemcpyAsync", 11, 4, "cuda_runtime", correlation=1),
        event("Memcpy HtoD (Pageable -> Device)", 13, 2, "gpu_memcpy", bytes=10, correlation=1),
        event(GEMM, 15, 1),
    )
    assert rounded(found.seconds) == {"products": 1, "transfers": 4, "waiting": 5}


def test_kernels_of_blocks_that_failed_to_compile_are_a_kind_of_their_own(profiled):
    found = profiled(
        event("uncompiled Block", 10, 1, "user_annotation"),
        event("uncompiled Block", 14, 5, "gpu_user_annotation"),
        event("cudaLaunchKernel", 10.5, 0.1, "cuda_runtime", correlation=1),
        event("cudaLaunchKernel", 12, 0.1, "cuda_runtime", correlation=2),
        event(GEMM, 14, 2, correlation=1),
        event(GEMM, 16, 1, correlation=2),
    )
    assert rounded(found.seconds) == {"uncompiled Block": 2, "products": 1, "waiting": 7}


@pytest.mark.parametrize("launch", ["cudaGraphLaunch", "cuLaunchKernelEx"])
def test_what_compiled_code_and_cuda_graphs_launch_is_compiled(profiled, launch):
    found = profiled(
        event("Torch-Compiled Region: 0/1", 11, 2, "cpu_op"),
        event(launch, 12 if launch == "cuLaunchKernelEx" else 13.5, 0.1, "cuda_driver", correlation=1),
        event("cudaLaunchKernel", 14, 0.1, "cuda_runtime", correlation=2),
        event(GEMM, 14, 3, correlation=1),
        event(FLASH, 17, 1, correlation=2),
    )
    assert found.compiled_share == pytest.approx(0.75)


def test_without_a_gpu_it_is_the_innermost_operator_and_the_rest_is_python(profiled):
    found = profiled(
        event("Torch-Compiled Region: 0/0", 11, 4, "cpu_op"),
        event("aten::addmm", 12, 1, "cpu_op"),
        event("aten::empty", 13.5, 0.5, "cpu_op"),
        event("aten::scaled_dot_product_attention", 15, 2, "cpu_op"),
        event("aten::bmm", 15.5, 1, "cpu_op"),
        event("uncompiled Block", 17, 2, "user_annotation"),
        event("aten::mm", 17, 1, "cpu_op"),
        event("aten::layer_norm", 19, 0.5, "cpu_op"),
        event("aten::mm", 11, 9, "cpu_op", tid=8),  # the thread that compiles
    )
    kinds = {"fused": 3, "products": 1, "attention": 2, "uncompiled Block": 2, "other": 0.5, "waiting": 1.5}
    assert rounded(found.seconds) == kinds and sum(kinds.values()) == found.span
    assert not found.on_gpu and found.compiled_share == pytest.approx(4 / 8.5)
    assert rounded(found.of_step(5)) == {kind: seconds / 2 for kind, seconds in kinds.items()}


def test_a_trace_without_a_step_has_no_profile(engine):
    assert engine("benchmark.step_profile").profile_of([event(GEMM, 1, 1)]) is None


def test_trace_holds_the_second_step_only_and_counts_its_operators(engine, tmp_path):
    trace, device = engine("benchmark.step_profile"), torch.device("cpu")
    path = tmp_path / "step.json"
    with trace.step_trace(path, device) as recording:
        for tensors in (5, 2):
            for _ in range(tensors):
                torch.ones(4).cos()
            recording.step()
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::cos") == 2
    assert trace.count(trace.events_of(path), device) >= 4
    assert trace.unit_for(device) == "operators" and trace.unit_for(torch.device("cuda")) == "CUDA kernels"


def test_a_trace_that_is_stopped_leaves_no_file(engine, tmp_path):
    path = tmp_path / "step.json"
    with pytest.raises(KeyboardInterrupt), engine("benchmark.step_profile").step_trace(path, torch.device("cpu")) as recording:
        recording.step()
        raise KeyboardInterrupt
    assert not path.exists()
