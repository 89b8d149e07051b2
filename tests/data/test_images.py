"""Images of every kind become RGB, and are known by their content."""

import struct
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from silentbad.data import images
from silentbad.errors import UserError
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


def test_a_mask_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    region = np.zeros((8, 8), np.uint8)
    region[:2, :3] = 255
    Image.fromarray(region).save(tmp_path / "mask.png", exif=exif)
    seen = np.asarray(images.open_mask(tmp_path / "mask.png", (8, 8), "x"))
    assert np.array_equal(seen, np.rot90(region, -1)) and not np.array_equal(seen, region)


def test_content_hash_ignores_the_file_format():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    png, bmp = (images.open_image(encoded(image, kind), "x") for kind in ("PNG", "BMP"))
    assert images.content_hash(png) == images.content_hash(bmp) != images.content_hash(image.rotate(90))


def test_a_strip_of_millions_of_pixels_is_refused():
    image = Image.new("RGBA", (9, 9), (1, 2, 3, 50))
    content = bytearray(encoded(image, "WEBP", save_all=True, append_images=[image.rotate(9)]))
    place = content.index(b"VP8X") + 12
    content[place : place + 3] = struct.pack("<I", 6_700_000 - 1)[:3]  # by 9: below the limit of pixels
    with pytest.raises(UserError, match="6700000x9 pixels, over the limit of 65535 a side"):
        images.open_image(bytes(content), "x")


def test_a_dark_picture_of_16_bits_stays_dark():
    dark = Image.fromarray(np.full((2, 2), 200, np.uint16))
    assert images.open_image(encoded(dark, "PNG"), "x").getpixel((0, 0)) == (1, 1, 1)


def test_a_picture_of_32_bits_is_refused():
    with pytest.raises(UserError, match="^x: the image holds values up to 655360; save it with 8 or 16 bits"):
        images.open_image(encoded(Image.fromarray(np.full((2, 2), 655360, np.int32)), "TIFF"), "x")


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_deep_pictures_are_scaled_line_by_line(mode):
    values = np.linspace(0, 65535, 600 * 500).reshape(600, 500)
    deep = Image.fromarray(values.astype(np.uint16) if mode == "I;16" else (values / 65535).astype(np.float32))
    content = encoded(deep, "TIFF")
    tracemalloc.start()
    grey = np.asarray(images.open_image(content, "x"))[..., 0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.abs(grey - values / 257).max() <= 0.51
    assert peak < 12 * values.size  # two copies in double precision are more


def test_copies_are_looked_for_in_a_smaller_picture():
    ramp = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    large, small = ramp.resize((5000, 3000)), ramp.resize((1250, 750))
    assert min(images.shrunk(large).size) < 2048 and images.shrunk(small) is small
    views = [images.as_floats(images.thumbnails(picture)) for picture in (large, small)]
    assert np.abs(views[0][:4] - views[1][:4]).max() < 3
