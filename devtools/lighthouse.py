"""Define the demo's picture, a lighthouse at dusk, and the VAE that paints it: 16 distance fields, written by hand.

The latent of a Flux has 16 channels at an eighth of the size. Here each channel is the signed distance from the edge of one
shape, which is smooth enough for such a grid; TAESD's decoder, a stack of convolutions and ReLU, scales it up and paints:

1. The first convolution adds OFFSET, so that no ReLU before the last block cuts anything off.
2. Those after nearest-neighbour scaling are (1, 2, 1) / 4 in both directions: together, bilinear scaling. A channel that is
   constantly 1 goes along, to take OFFSET away again: zero padding dims it at the border as it dims the others.
3. The last block makes masks: relu(g * d + 1/2) - relu(g * d - 1/2) goes from 0 to 1 across the edge; then what is visible of
   each shape: relu(mask - the masks above).
4. The last convolution colours.

`train_lighthouse.py` trains the tiny Flux that draws it. Import it only where the host is on sys.path.
"""

from pathlib import Path

import comfy.taesd.taesd
import safetensors.torch
import torch

WEIGHTS = Path(__file__).with_suffix(".safetensors")
VAE = "lighthouse-vae.safetensors"
# Of the whole scene; a narrower image shows its left part.
WIDTH, HEIGHT = 512, 512
NARROW = 384
CHANNELS = 16
# Tokens of the prompt. Their width is their number: the prompt is an identity matrix, and txt_in the model's only text encoder.
TOKENS = 32
# Pixels from the edge at which a channel has reached its largest value, 1; and those across which its mask rises.
REACH, SOFT = 32, 2
OFFSET = 1.5
# Of the host's latent format for Flux: undone here, so that the decoder is given what the model made.
SCALE, SHIFT = 0.3611, 0.1159


def _polygon(x, y, *corners):
    """Signed distance (positive inside, too large outside beyond corners) from a convex polygon, its corners clockwise."""
    inside = None
    for (ax, ay), (bx, by) in zip(corners, (*corners[1:], corners[0]), strict=True):
        length = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5
        side = ((bx - ax) * (y - ay) - (by - ay) * (x - ax)) / length
        inside = side if inside is None else torch.minimum(inside, side)
    return inside


def _circle(x, y, cx, cy, radius, flat=1.0):
    return radius - ((x - cx) ** 2 + ((y - cy) * flat) ** 2).sqrt()


def _union(*shapes):
    return torch.stack(shapes).amax(0)


def distances():
    """{shape: signed distance in pixels, positive inside}, at the centres of the latent's cells."""
    y, x = torch.meshgrid(torch.arange(4, HEIGHT, 8.0), torch.arange(4, WIDTH, 8.0), indexing="ij")
    tower = _polygon(x, y, (166, 160), (214, 160), (230, 420), (150, 420))
    band = 26 * torch.sin((y - 160) * (torch.pi / 46))
    cloud = _union(
        _circle(x, y, 330, 78, 34, 2.2), _circle(x, y, 368, 66, 30, 1.6), _circle(x, y, 408, 80, 36, 2.4),
        _circle(x, y, 52, 150, 30, 2.2), _circle(x, y, 86, 142, 26, 1.7), _circle(x, y, 118, 154, 24, 2.2),
        _circle(x, y, 282, 252, 26, 2.4), _circle(x, y, 312, 246, 24, 1.8), _circle(x, y, 338, 254, 20, 2.4),
    )  # fmt: skip
    hills = _union(_circle(x, y, 560, 520, 196), _circle(x, y, 420, 560, 216), _circle(x, y, 690, 460, 150))
    cliff = _union(
        _polygon(x, y, (-80, 404), (262, 404), (318, 560), (-80, 560)),
        _polygon(x, y, (200, 446), (322, 446), (372, 560), (200, 560)),
    )
    glitter = _union(
        _circle(x, y, 40, 384, 26, 3.5), _circle(x, y, 300, 386, 26, 3.5), _circle(x, y, 456, 382, 40, 5),
        _circle(x, y, 380, 410, 28, 3.5),
        _circle(x, y, 470, 412, 30, 3.8), _circle(x, y, 320, 440, 24, 3.3), _circle(x, y, 430, 444, 28, 3.5),
        _circle(x, y, 500, 466, 24, 3.3), _circle(x, y, 390, 480, 28, 3.5), _circle(x, y, 456, 498, 26, 3.5),
    )  # fmt: skip
    return {
        "height": y / HEIGHT * REACH,
        "moon": _circle(x, y, 456, 196, 40),
        "cloud": cloud,
        "hills": hills,
        "sea": y - 366,
        "glitter": glitter,
        "cliff": cliff,
        "grass": torch.minimum(cliff, 26 + 4 * torch.sin(x / 17) - (y - 404)),
        "beam": _union(_polygon(x, y, (196, 126), (660, 10), (660, 150)), _polygon(x, y, (184, 126), (-80, 176), (-80, 108))),
        "tower": tower,
        "bands": band,
        "gallery": _union(
            _polygon(x, y, (152, 148), (228, 148), (222, 164), (158, 164)),
            _polygon(x, y, (144, 404), (236, 404), (240, 424), (140, 424)),
        ),
        "lantern": _polygon(x, y, (172, 104), (208, 104), (208, 150), (172, 150)),
        "roof": _polygon(x, y, (190, 64), (222, 108), (158, 108)),
        "door": _union(
            _polygon(x, y, (178, 372), (202, 372), (202, 408), (178, 408)),
            _circle(x, y, 190, 372, 12),
            _polygon(x, y, (182, 206), (198, 206), (198, 230), (182, 230)),
            _polygon(x, y, (182, 294), (198, 294), (198, 318), (182, 318)),
        ),
        "shade": x - 198,
    }


def scene():
    """What the model is to draw: (1, 16, HEIGHT / 8, WIDTH / 8)."""
    return torch.stack([(distance / REACH).clamp(-1, 1) for distance in distances().values()])[None]


# From the bottom up: a shape and its colour, which hide what lies below. "" is everywhere.
PAINT = {
    "": (0.12, 0.20, 0.42),
    "moon": (1.0, 0.93, 0.74),
    "hills": (0.33, 0.30, 0.47),
    "sea": (0.10, 0.28, 0.42),
    "cliff": (0.29, 0.24, 0.25),
    "grass": (0.30, 0.46, 0.27),
    "tower": (0.96, 0.94, 0.90),
    "lantern": (1.0, 0.84, 0.36),
    "gallery": (0.20, 0.21, 0.27),
    "roof": (0.72, 0.18, 0.17),
    "door": (0.22, 0.20, 0.26),
}
# What is added to the colour of the first, where it is visible and the second is.
TINT = (
    ("", "height", (1.25, 0.52, 0.0)),
    ("", "cloud", (0.20, 0.14, 0.14)),
    ("", "beam", (0.30, 0.27, 0.12)),
    ("sea", "height", (-0.14, -0.10, -0.06)),
    ("sea", "glitter", (0.30, 0.22, 0.14)),
    ("tower", "bands", (-0.20, -0.73, -0.70)),
    ("tower", "shade", (-0.16, -0.14, -0.08)),
    ("cliff", "shade", (-0.09, -0.08, -0.07)),
)
# Shapes whose values are used as they are, from 0 to 1, instead of a mask.
RAMPS = {"height"}


def decoder():
    """The weights of the host's TAESD, all zero but for what is needed."""
    names = list(distances())
    state = {
        key: torch.zeros_like(value) for key, value in comfy.taesd.taesd.TAESD(latent_channels=CHANNELS).state_dict().items()
    }
    state["vae_scale"], state["vae_shift"] = torch.tensor(SCALE), torch.tensor(SHIFT)

    def weight(layer, kind="weight"):
        return state[f"taesd_decoder.{layer}.{kind}"]

    one = CHANNELS
    for channel in range(CHANNELS):
        weight(1)[channel, channel, 1, 1] = 1
    weight(1, "bias")[:CHANNELS] = OFFSET
    weight(1, "bias")[one] = 1
    smooth = torch.outer(*[torch.tensor([0.25, 0.5, 0.25])] * 2)
    for layer in (7, 12, 17):
        for channel in range(CHANNELS + 1):
            weight(layer)[channel, channel] = smooth

    rising, falling, paint, colour = weight("18.conv.0"), weight("18.conv.2"), weight("18.conv.4"), weight(19)
    # mask = first - second; the constant is handed on.
    first, second = {name: i for i, name in enumerate(names)}, {name: CHANNELS + i for i, name in enumerate(names)}
    ones = 2 * CHANNELS
    weight("18.conv.0", "bias")[ones] = 1
    for name, channel in first.items():
        gain, edge = (1, 0) if name in RAMPS else (REACH / SOFT, 0.5)
        for out, side in ((channel, edge), (second[name], edge - 1)):
            rising[out, channel, 1, 1] = gain
            rising[out, one, 1, 1] = -gain * OFFSET
            weight("18.conv.0", "bias")[out] = side

    def add_mask(out, name, factor):
        if not name:
            falling[out, ones, 1, 1] += factor
            return
        falling[out, first[name], 1, 1] += factor
        falling[out, second[name], 1, 1] -= factor

    layers = list(PAINT)
    painted = [(base, None, rgb) for base, rgb in PAINT.items()] + list(TINT)
    for out, (base, tint, rgb) in enumerate(painted):
        add_mask(out, base, 1)
        if tint:
            add_mask(out, tint, 1)
            falling[out, ones, 1, 1] -= 1
        for above in layers[layers.index(base) + 1 :]:
            add_mask(out, above, -1)
        # The block adds its input, which has the channels up to `one`.
        paint[one + 1 + out, out, 1, 1] = 1
        colour[:, one + 1 + out, 1, 1] = torch.tensor(rgb)
    return state


def distance_from_scene(latent):
    """Mean distance of a latent, as ComfyUI saves it, from the scene."""
    drawn = (latent - SHIFT) * SCALE
    return float((drawn - scene()[..., : latent.shape[-1]]).abs().mean())


def write(models):
    """Write the model, in full precision, and the VAE into a server's models/."""
    for folder, name, state in (
        ("diffusion_models", WEIGHTS.name, {k: v.float() for k, v in safetensors.torch.load_file(WEIGHTS).items()}),
        ("vae", VAE, decoder()),
    ):
        (models / folder).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(state, str(models / folder / name))
