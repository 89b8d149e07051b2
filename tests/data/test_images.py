"""Images of every kind become RGB, and are known by their content."""

import numpy as np
from PIL import Image

from silentbad.data import images
from tests.folders import encoded


def test_kinds_of_images_become_rgb():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    wide = Image.new("RGB", (8, 4), "red")
    assert images.open_image(encoded(wide, "JPEG", exif=exif), "x").size == (4, 8)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert images.open_image(encoded(clear, "PNG"), "x").getpixel((0, 0)) == (255, 255, 255)
    assert images.open_image(encoded(wide.convert("CMYK"), "JPEG"), "x").mode == "RGB"
    deep = Image.fromarray(np.full((4, 4), 257 * 128, dtype=np.uint16))
    assert images.open_image(encoded(deep, "PNG"), "x").getpixel((0, 0)) == (128, 128, 128)
    palette = wide.convert("P")
    assert (
        images.open_image(encoded(palette, "PNG", transparency=palette.getpixel((0, 0))), "x").getpixel((0, 0))
        == (255,) * 3
    )
    real = Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32))
    assert images.open_image(encoded(real, "TIFF"), "x").getpixel((0, 0)) == (128, 128, 128)


def test_content_hash_ignores_the_file_format():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    png, bmp = (images.open_image(encoded(image, kind), "x") for kind in ("PNG", "BMP"))
    assert images.content_hash(png) == images.content_hash(bmp) != images.content_hash(image.rotate(90))
