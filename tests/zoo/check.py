"""Builds set-ups of the zoo and runs each: finite, not constant, the same twice. `check.py --host COMFYUI [NAME...]`"""

import argparse
import sys
import time
import traceback
from pathlib import Path


def enter(host: Path) -> None:
    """The host's options and modules; this folder itself must not be on the path, nor the pack's root."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(host), *(entry for entry in sys.path if Path(entry or ".").resolve() != here), str(here.parent)]
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()


def check(setup, sampling: bool) -> str:
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        # Memory that nobody fills then is NaN, and shows.
        torch.use_deterministic_algorithms(True, warn_only=True)
        model, twin = setup.build(), setup.build()
        torch.use_deterministic_algorithms(False)
        built = (time.perf_counter() - start) / 2
        shapes, seconds = [], []
        for size, batch in ((0, 2), (0, 1), (1, 2), (1, 1), (2, 3)):
            inputs = setup.inputs(size, batch, model=model)
            begin = time.perf_counter()
            out = model.apply_model(**inputs)
            seconds.append(time.perf_counter() - begin)
            assert out.shape == inputs["x"].shape, f"{tuple(out.shape)} from {tuple(inputs['x'].shape)}"
            assert torch.isfinite(out).all(), "not finite"
            # apply_model mixes the input in; without it the network's own part remains.
            assert out.std() > 1e-6 and (out - inputs["x"]).std() > 1e-6, "constant"
            assert torch.equal(out, model.apply_model(**setup.inputs(size, batch, model=model))), "two runs differ"
            assert torch.equal(out, twin.apply_model(**setup.inputs(size, batch, model=twin))), "two builds differ"
            shapes.append("x".join(map(str, out.shape)))
        if sampling and setup.sampleable:
            sample(setup, model)
    count = sum(p.numel() for p in model.parameters())
    return (
        f"{setup.name:24} {count / 1e6:6.2f}M  build {built:5.2f} s  forward {max(seconds):5.2f} s  "
        f"{shapes[0]} {shapes[2]}{'' if setup.sampleable else '  not sampleable: ' + setup.reason}"
    )


def sample(setup, model) -> None:
    import comfy.sample
    import comfy.samplers
    import torch

    patcher, latent = setup.patcher(model), setup.latent()
    positive, negative = setup.conds()
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", 2)
    cfg = 1.0 if setup.max_batch == 1 else 3.0
    out = comfy.sample.sample_custom(
        patcher,
        comfy.sample.prepare_noise(latent, 1),
        cfg,
        comfy.samplers.sampler_object("euler"),
        sigmas,
        positive,
        negative,
        latent,
        disable_pbar=True,
        seed=1,
    )
    parts = out.unbind() if out.is_nested else [out]
    assert all(torch.isfinite(part).all() and part.std() > 0 for part in parts), "the sampler's result is not finite"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the folder of ComfyUI")
    parser.add_argument("--sample", action="store_true", help="also take two steps of the host's sampler")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    enter(options.host.resolve())

    import logging

    import zoo

    logging.disable(logging.WARNING)
    failed = []
    names = options.names or list(zoo.SETUPS)
    for name in names:
        try:
            print(check(zoo.SETUPS[name], options.sample), flush=True)
        except Exception:
            failed.append(name)
            print(f"{name:24} FAILED\n{traceback.format_exc(limit=-5)}", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} set-ups passed")
    if failed:
        print("failed:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
