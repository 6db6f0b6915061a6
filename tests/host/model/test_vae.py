"""A VAE whose images lie channels_last: the host's own VAEs, with plain PyTorch in place of our Triton kernels."""

import gc
import itertools
import weakref

import pytest
import torch
from reference_kernels import Reference
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
IMAGE = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "attn_resolutions": [], "dropout": 0.0, "z_channels": 4,
}  # fmt: skip
VIDEO = {
    "dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip


def image_network():
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    part = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{part}.Encoder", "params": IMAGE},
        decoder_config={"target": f"{part}.Decoder", "params": {**IMAGE, "ch": 32}},
    )


def video_network():
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(**VIDEO)


LATENTS = {"image": (image_network, (1, 4, 4, 3)), "video": (video_network, (1, 16, 3, 4, 3))}


class Kernels(Reference):
    ready = True

    def prepare(self, _device):
        self.asked = True


@pytest.fixture
def kernels(engine, monkeypatch):
    """A CPU counts as a GPU with our kernels, and fp32 as a dtype for tensor cores."""
    found, attach = Kernels(), engine("host.model.vae")
    monkeypatch.setattr(attach, "norm_kernels", found)
    monkeypatch.setattr(attach, "left_alone", lambda _vae: None)
    for module in (attach, engine("channels_last.function_mode")):
        monkeypatch.setattr(module, "kernels", lambda: found)
        monkeypatch.setattr(module, "DTYPES", {torch.float32})
    return found


@pytest.fixture
def clock(engine, monkeypatch):
    """A list of the seconds that the next timed calls take."""
    seconds, read = [], itertools.count()

    def seconds_when_done(_device):
        """Read at the begin and at the end of each timed call."""
        return seconds.pop(0) if next(read) % 2 else 0.0

    monkeypatch.setattr(engine("host.model.vae"), "seconds_when_done", seconds_when_done)
    return seconds


@pytest.fixture(params=LATENTS)
def vae(request):
    return make(request.param)


def make(name):
    import comfy.sd

    network, latent = LATENTS[name]
    torch.manual_seed(3)
    with torch.inference_mode(False):
        weights = {key: torch.randn_like(w) * (0.05 if w.dim() > 1 else 0.2) for key, w in network().state_dict().items()}
    found = comfy.sd.VAE(weights)
    return found, torch.randn(latent)


def attached(engine, vae):
    return engine("host.model.vae").attach_vae(vae)


def laid_out(vae, name="decode"):
    return vae.patcher.object_patches[name]


@pytest.mark.parametrize("faster", [True, False])
def test_both_ways_give_the_same_and_the_faster_one_stays(vae, engine, kernels, clock, faster):
    vae, latent = vae
    expected, ours = vae.decode(latent), attached(engine, vae)
    clock += [9, 9, 1 if faster else 1.96, 2]
    used = []
    for _ in range(6):
        before = kernels.weights
        assert relative_error(ours.decode(latent), expected) < 1e-5
        used.append(kernels.weights > before)
    assert used == [False, True, True, False, faster, faster] and not clock
    assert laid_out(ours).channels_last is faster
    before = kernels.weights
    assert relative_error(ours.decode(latent[..., :3, :2]), vae.decode(latent[..., :3, :2])) < 1e-5, "other sizes, untimed"
    assert (kernels.weights > before) == faster


def test_encoding_and_tiles_too(vae, engine, kernels, clock):
    vae, latent = vae
    ours, pixels = attached(engine, vae), vae.decode(latent)
    pixels = pixels[0] if pixels.dim() == 5 else pixels
    clock += [1] * 1000
    laid_out(ours, "encode").channels_last = laid_out(ours).channels_last = True
    for function, given in ((vae.encode, pixels), (vae.decode_tiled, latent)):
        mine, before = getattr(ours, function.__name__), kernels.weights
        assert relative_error(mine(given), function(given)) < 1e-5
        assert kernels.weights > before


def test_the_vae_that_was_given_stays_as_it_is(vae, engine, kernels, clock):
    vae, latent = vae
    expected, ours = vae.decode(latent), attached(engine, vae)
    laid_out(ours).channels_last = True
    twice = attached(engine, ours)
    assert laid_out(twice).function == vae.first_stage_model.decode, "not one around the other"
    for _ in range(2):
        ours.decode(latent)
        count = kernels.weights
        assert count and torch.equal(vae.decode(latent), expected) and kernels.weights == count


def test_before_the_kernels_are_there_nothing_changes(engine, kernels, clock):
    vae, latent = make("image")
    ours, kernels.ready = attached(engine, vae), False
    assert kernels.asked
    clock += [1]
    for _ in range(3):
        ours.decode(latent)
    assert not kernels.weights and laid_out(ours).channels_last is None


def test_without_memory_either_way_it_is_not_tried_again(engine, kernels, clock):
    """The host then decodes in tiles, for this size each time."""
    tried = []

    def decode(x):
        tried.append(x.shape)
        raise torch.OutOfMemoryError("full")

    laid_out = engine("host.model.vae").LaidOut("decode", decode, engine("messages.status").Line(None))
    laid_out.channels_last = True
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            laid_out(torch.zeros(1, 4, 4, 3))
    assert len(tried) == 3, "channels last and plain, then plain"


@pytest.mark.parametrize(
    ("error", "tried_again"), [(torch.OutOfMemoryError("full"), True), (RuntimeError("no such kernel"), False)]
)
def test_what_fails_that_way_runs_the_plain_one(engine, kernels, clock, caplog, error, tried_again):
    """Out of memory is of that size."""
    vae, latent = make("image")
    expected, ours = vae.decode(latent), attached(engine, vae)
    laid_out(ours).channels_last = True
    factors_of = kernels.factors_of
    kernels.factors_of = lambda *_: (_ for _ in ()).throw(error)
    assert torch.equal(ours.decode(latent), expected)
    assert laid_out(ours).channels_last is tried_again and ("no memory" in caplog.text) == tried_again
    kernels.factors_of, before = factors_of, kernels.weights
    assert torch.equal(ours.decode(latent), expected) and kernels.weights == before
    ours.decode(latent[..., :-1])
    assert (kernels.weights > before) == tried_again


def test_the_device_that_the_latent_is_on_is_timed(engine, kernels, monkeypatch):
    """Select VAE Device may come after this pack's node."""
    module, timed = engine("host.model.vae"), []
    monkeypatch.setattr(module, "seconds_when_done", lambda device: timed.append(device) or 0.0)
    module.LaidOut("decode", lambda x: x, engine("messages.status").Line(None))(torch.zeros(1, 4, 4, 4, device="meta"))
    encode = module.LaidOut("encode", lambda x, device: x, engine("messages.status").Line(None))
    encode(torch.zeros(1, 3, 4, 4), device=torch.device("meta"))  # comfy/sd.py, `comfy_has_chunked_io`
    assert timed == [torch.device("meta")] * 4


def test_an_error_of_the_call_itself_gives_nothing_up(engine, kernels, clock):
    """A latent of another model."""
    vae, _latent = make("image")
    ours = attached(engine, vae)
    laid_out(ours).channels_last = True
    with pytest.raises(RuntimeError):
        ours.decode(torch.randn(1, 16, 4, 4))
    assert laid_out(ours).channels_last is True


def test_gradients_go_through(engine, kernels, clock):
    """Nodes that optimise an image by what its decoding shows."""
    with torch.inference_mode(False), torch.enable_grad():
        vae, latent = make("image")
        decode = laid_out(attached(engine, vae))
        decode.channels_last = True
        x = latent.clone().to(vae.vae_dtype).requires_grad_()
        decode(x).square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and not kernels.weights


def test_a_cancel_ends_the_call(engine, kernels, clock):
    import comfy.model_management

    vae, latent = make("image")
    ours, cancel = attached(engine, vae), comfy.model_management.InterruptProcessingException
    laid_out(ours).channels_last = True
    kernels.factors_of = lambda *_: (_ for _ in ()).throw(cancel())
    with pytest.raises(cancel):
        ours.decode(latent)
    assert laid_out(ours).channels_last is True


def test_an_image_too_large_for_the_kernels_has_its_norms_computed_by_pytorch(engine, kernels, clock, monkeypatch):
    vae, latent = make("image")
    expected, ours = vae.decode(latent), attached(engine, vae)
    laid_out(ours).channels_last = True
    monkeypatch.setattr(engine("channels_last.function_mode"), "MOST_VALUES", 1000)
    assert relative_error(ours.decode(latent), expected) < 1e-5
    assert kernels.norms == 0 and kernels.weights


class TestLeftAlone:
    """With a sentence on the node, and the same result."""

    @pytest.fixture
    def told(self, engine, monkeypatch):
        lines = []
        monkeypatch.setattr(engine("messages.status"), "listeners", [lambda *given: lines.append(given)])
        return lines

    def test_on_a_cpu(self, engine, told):
        vae, latent = make("image")
        ours = engine("host.model.vae").attach_vae(vae, "7")
        assert [(*to, line[:2]) for *to, line in told] == [((None, None), "7", ("unclear", [["leftAsIs", ["vaeNoGpu"]]]))]
        assert engine("messages.status").lines_of()["7"] == told[0][2], "for a page that is opened later"
        assert ours.patcher is vae.patcher and torch.equal(ours.decode(latent), vae.decode(latent))

    @pytest.mark.parametrize(("dtype", "compiled"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)])
    def test_in_32_bits_or_compiled_by_another(self, engine, monkeypatch, dtype, compiled):
        vae, _ = make("image")
        attach = engine("host.model.vae")
        monkeypatch.setattr(attach, "kernels", lambda: object())
        vae.device, vae.vae_dtype = torch.device("cuda"), dtype
        if compiled:  # as KJNodes does it
            vae.first_stage_model.decoder = torch.compile(vae.first_stage_model.decoder)
        why = attach.left_alone(vae)
        reason = ["compiledElsewhere"] if compiled else ["vaeWide", "float32"] if dtype is torch.float32 else None
        assert why == (["leftAsIs", reason] if reason else None)

    def test_compiled_by_a_later_node(self, engine, kernels, told):
        """KJNodes' TorchCompileVAE compiles in place: with each `ChannelsLast` it compiled anew."""
        vae, latent = make("image")
        expected, graphs = vae.decode(latent), []
        ours = engine("host.model.vae").attach_vae(vae, "7")
        backend = lambda graph, _inputs: graphs.append(graph) or graph  # noqa: E731
        ours.first_stage_model.decoder = torch.compile(ours.first_stage_model.decoder, backend=backend)
        for _ in range(8):
            assert relative_error(ours.decode(latent), expected) == 0.0
        assert len(graphs) == 1 and kernels.norms == 0
        assert told[-1][2][:2] == ("unclear", [["leftAsIs", ["compiledElsewhere"]]])

    def test_what_is_no_vae_is_refused(self, engine):
        with pytest.raises(engine("errors").InvalidSetting, match=r"vae = .*connect a VAE"):
            engine("host.model.vae").attach_vae("something")


def test_what_was_found_is_told_once(engine, kernels, clock, monkeypatch):
    lines = []
    monkeypatch.setattr(engine("messages.status"), "listeners", [lambda *given: lines.append(given)])
    vae, latent = make("image")
    ours = engine("host.model.vae").attach_vae(vae, "7")
    clock += [9, 9, 1, 2]
    for _ in range(7):
        ours.decode(latent)
    assert [(line.state, *line.says) for _, _, line in lines] == [
        ("unclear", ["vaeReady"]), ("faster", ["decodingFaster", "50%", "2.000", "1.000"]),
    ]  # fmt: skip


def test_a_page_that_is_opened_later_gets_the_line_when_it_decodes(engine, kernels, clock, monkeypatch):
    vae, latent = make("image")
    ours, status = engine("host.model.vae").attach_vae(vae, "7"), engine("messages.status")
    monkeypatch.setattr(status, "owner_now", lambda: ("another", "workflow"))
    clock += [1] * 10
    ours.decode(latent)
    assert status.lines_of("another")["7"].says == [["vaeReady"]]


def test_a_clone_with_a_network_of_its_own_runs_that_one(engine, kernels, clock):
    """Select VAE Device of ComfyUI clones so for another GPU."""
    vae, _ = make("image")
    ours = attached(engine, vae)
    clock += [1] * 100
    other, _ = make("image")
    with torch.no_grad():
        for weight in other.first_stage_model.parameters():
            weight *= 0.5
    clone = ours.patcher.clone(model_override=(other.first_stage_model, (other.patcher.backup, {}, {}, set())))
    assert laid_out(ours).function.__self__ is vae.first_stage_model
    found = clone.object_patches["decode"]
    assert found.function.__self__ is other.first_stage_model and found is not laid_out(ours)
    assert clone.clone().object_patches["decode"] is found


@pytest.mark.parametrize("then_plain", [False, True])
def test_a_vae_that_nobody_uses_is_freed_at_once(engine, kernels, clock, then_plain):
    """Else ComfyUI warns of a memory leak, and its memory is taken until garbage is collected."""
    clock += [1.0] * 100
    vae, latent = make("image")
    ours = attached(engine, vae)
    ours.decode(latent)
    if then_plain:
        vae.decode(latent)
    gone = weakref.ref(vae.first_stage_model)
    gc.collect()
    gc.disable()
    try:
        del vae, ours
        assert gone() is None
    finally:
        gc.enable()


def test_kernels_that_could_not_be_made_are_tried_again_but_not_for_ever(engine, monkeypatch):
    norm = engine("channels_last.preparing")
    kernels, asked = norm._NormKernels(), []
    monkeypatch.setattr(norm.compiler, "submit", lambda job: (asked.append(1), setattr(job, "over", True)))
    for _ in range(5):
        kernels.prepare(torch.device("cpu"))
    assert len(asked) == norm.MOST_TRIES
    kernels = norm._NormKernels()
    kernels.ready = True
    kernels.prepare(torch.device("cpu"))
    assert len(asked) == norm.MOST_TRIES


def test_no_thread_is_begun_where_none_may_be(engine, kernels, monkeypatch):
    monkeypatch.setattr(engine("host.model.vae"), "forbids_threads", lambda: True)
    attached(engine, make("image")[0])
    assert not hasattr(kernels, "asked")
