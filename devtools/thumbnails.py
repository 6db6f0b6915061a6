"""Draw the pictures of the templates (workflows/*.jpg): a plain card with the model's name and a lightning mark.

python -m devtools.thumbnails    # with a Python that has Pillow
"""

from PIL import Image, ImageDraw, ImageFont

from .prompts import TEMPLATES

SIZE, SCALE = 512, 3  # pixels; drawn larger, then scaled down
INK, MUTED = "#f4f1ea", "#b9c4d0"
# A background for each, from the simple one to the hard one.
COLORS = ("#24504a", "#2d4a63", "#4a3f63", "#63453f", "#5a5030")
BOLT = ((0.60, 0.00), (0.10, 0.58), (0.44, 0.58), (0.34, 1.00), (0.88, 0.38), (0.54, 0.38))


def draw(title: str, subtitle: str, color: str) -> Image.Image:
    whole = SIZE * SCALE
    image = Image.new("RGB", (whole, whole), color)
    pen = ImageDraw.Draw(image)
    left, top, size = 0.36 * whole, 0.16 * whole, 0.30 * whole
    pen.polygon([(left + x * size, top + y * size) for x, y in BOLT], "#f2c14e")
    for text, y, height, ink in ((title, 0.62, 0.105, INK), (subtitle, 0.76, 0.052, MUTED)):
        font = ImageFont.load_default(height * whole)
        while pen.textlength(text, font) > 0.9 * whole:
            font = ImageFont.load_default(font.size * 0.95)
        pen.text((whole / 2, y * whole), text, ink, font, anchor="mm")
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def main() -> None:
    for template, color in zip(TEMPLATES, COLORS, strict=True):
        _number, _, name = template.stem.partition(" ")
        title, _, subtitle = name.partition(" with ")
        draw(title, subtitle, color).save(template.with_suffix(".jpg"), quality=88)


if __name__ == "__main__":
    main()
