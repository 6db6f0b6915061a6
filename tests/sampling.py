"""How the host samples, for tests inside its process."""


def sample(patcher, conditioning, latent, cfg, seed, steps=3, sampler="euler", scheduler="simple"):
    """What the host's KSampler node does (nodes.py, common_ksampler)."""
    import nodes

    positive, negative = conditioning
    (result,) = nodes.common_ksampler(
        patcher, seed, steps, cfg, sampler, scheduler, positive, negative, {"samples": latent}, denoise=1.0
    )
    return result["samples"]
