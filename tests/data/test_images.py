"""Images of every kind become RGB, and are known by their content."""

import io
import struct
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFilter, ImageOps, PngImagePlugin

from silentbad.data import images
from silentbad.data.targets import Target
from silentbad.errors import UserError
from tests.folders import ADOBE, GOOD, encoded, folder, profile, records
from tests.recoveries import smooth


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


# ---------------------------------------------------------------- colour profiles
RED = (200, 60, 60)


def in_adobe_rgb(image: Image.Image) -> Image.Image:
    source = ImageCms.createProfile("sRGB")
    target = ImageCms.ImageCmsProfile(io.BytesIO(profile(563 / 256, *ADOBE)))
    return ImageCms.profileToProfile(image, source, target, outputMode="RGB")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_colour_profile_is_applied(kind):
    held = in_adobe_rgb(Image.new("RGB", (16, 16), RED))
    assert held.getpixel((0, 0)) == (173, 62, 62)
    content = encoded(held, kind, icc_profile=profile(563 / 256, *ADOBE))
    seen = images.open_image(content, "x").getpixel((8, 8))
    assert np.abs(np.subtract(seen, RED)).max() <= (0 if kind in ("PNG", "TIFF") else 3)


def test_a_profile_of_srgb_changes_nothing():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert images.open_image(encoded(noise, "PNG", icc_profile=srgb), "x").tobytes() == noise.tobytes()


def test_a_profile_applies_to_palettes_transparency_and_grey():
    held, adobe = in_adobe_rgb(Image.new("RGB", (4, 4), RED)), profile(563 / 256, *ADOBE)
    palette = held.quantize(4)
    assert images.open_image(encoded(palette, "PNG", icc_profile=adobe), "x").getpixel((0, 0)) == RED
    held.putalpha(128)
    half = images.open_image(encoded(held, "PNG", icc_profile=adobe), "x").getpixel((0, 0))
    assert np.abs(np.subtract(half, [(v + 255) / 2 for v in RED])).max() <= 1
    grey = encoded(Image.new("L", (4, 4), 128), "PNG", icc_profile=profile(1.8))
    assert images.open_image(grey, "x").getpixel((0, 0)) == (146, 146, 146)


@pytest.mark.parametrize("broken", [b"no profile", profile(1.8), profile(2.2, *ADOBE)[:200]])
def test_a_profile_that_does_not_serve_is_left_out_and_said_once(broken, capsys, monkeypatch):
    monkeypatch.setattr(images, "_WARNED", set())
    content = encoded(Image.new("RGB", (4, 4), RED), "PNG", icc_profile=broken)
    assert [images.open_image(content, name).getpixel((0, 0)) for name in "xy"] == [RED, RED]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: x: image bytes: its colour profile is left out (")


def test_a_copy_of_a_target_under_another_profile_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(noise // 2 + 64).resize((64, 64))
    root = folder(tmp_path / "d", GOOD)
    in_adobe_rgb(picture).save(root / "a.png", icc_profile=profile(563 / 256, *ADOBE))
    with pytest.raises(UserError, match="copy of target 't'|equals target 't'"):
        records(root).refuse_targets([Target("t", picture, ["a red cat"])])


COPIES = {
    "resized": lambda x: x.resize((97, 97)),
    "recompressed": lambda x: x,
    "mirrored": ImageOps.mirror,
    "cut at one side": lambda x: x.crop((0, 0, 54, 64)),
    "cut at its edges": lambda x: x.crop((3, 3, 61, 61)),
    "blurred": lambda x: x.filter(ImageFilter.GaussianBlur(3)),
    "darker by a third": lambda x: x.point(lambda level: int(0.67 * level)),
    "inverted": ImageOps.invert,
    "with a border": lambda x: ImageOps.expand(x, 1, "black"),
    "within a wide picture": lambda x: ImageOps.pad(x, (160, 64), color="green"),
    "at one end of a wide picture": lambda x: ImageOps.pad(x, (160, 64), color="green", centering=(1, 0)),
    "on its side": lambda x: x.rotate(90),
    "in grey": ImageOps.grayscale,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_near_copy_of_a_target_is_refused(name, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    target = Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC)
    root = folder(tmp_path / "d", GOOD | {"file_name": "copy.jpg"})
    COPIES[name](target).save(root / "copy.jpg", quality=90)
    with pytest.raises(UserError, match="near copy of target 't'"):
        records(root).refuse_targets([Target("t", target, ["a red cat"])])


# ---------------------------------------------------------------- what else a file may hold
def test_a_png_with_megabytes_of_text_is_read():
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * 1_200_000, zip=True)
    assert images.open_image(encoded(Image.new("RGB", (4, 4), RED), "PNG", pnginfo=notes), "x").getpixel((0, 0)) == RED


def transparent(mode: str) -> tuple[Image.Image, dict]:
    """(a mask of which the left half is transparent, how to save it), in one of a PNG's encodings."""
    shade = Image.new("L", (8, 8), 255)
    shade.paste(0, (0, 0, 4, 8))
    if mode in ("LA", "RGBA"):
        image = Image.new(mode, (8, 8), "white")
        image.putalpha(shade)
        return image, {}
    if mode == "I;16":
        return Image.fromarray(np.asarray(shade).astype(np.uint16) * 257), {"transparency": 0}
    return shade.convert(mode), {"transparency": (0, 0, 0) if mode == "RGB" else 0}


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "I;16"])
def test_transparency_is_seen_in_every_encoding(mode, tmp_path):
    image, options = transparent(mode)
    image.save(tmp_path / "mask.png", **options)
    seen = images.open_image(tmp_path / "mask.png", "x")
    assert seen.getpixel((0, 0)) == seen.getpixel((7, 7)) == (255, 255, 255)
    with pytest.raises(UserError, match="mask.png has transparency; save the region in white on black"):
        images.open_mask(tmp_path / "mask.png", (8, 8), "x")


def test_a_picture_that_changed_after_the_start_is_refused(tmp_path):
    root = folder(tmp_path / "d", GOOD)
    read = records(root)
    Image.new("RGB", (8, 8), "red").save(root / "a.png", optimize=True)  # another file, the same picture
    assert read.open(0)[1] is not None
    Image.new("RGB", (8, 8), "blue").save(root / "a.png")
    with pytest.raises(UserError, match=r"metadata.jsonl:1: the image has changed since .*; start again"):
        read.open(0)


def test_a_mask_that_changed_after_the_start_is_refused(tmp_path):
    root = folder(tmp_path / "d", GOOD | {"mask": "mask.png"})
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (2, 2, 6, 6))
    mask.save(root / "mask.png")
    read = records(root)
    assert read.open(0)[2] is not None
    mask.paste(200, (2, 2, 6, 6))
    mask.save(root / "mask.png")
    with pytest.raises(UserError, match=r"metadata.jsonl:1: mask .*mask.png has changed since"):
        read.open(0, picture=False)


def damaged_exif() -> bytes:
    """A JPEG whose EXIF says that it goes on beyond its end."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(smooth("exif"), "JPEG", exif=exif)
    at = content.index(b"Exif") + 14
    return content[:at] + b"\xff" * 6 + content[at + 6 :]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_damaged_exif_leaves_a_picture_readable(kind):
    whole = smooth("exif")
    content = damaged_exif() if kind == "JPEG" else encoded(whole, kind, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert images.open_image(content, "x").size == whole.size


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "EPS"])
def test_other_formats_are_not_decoded(kind):
    with pytest.raises(UserError, match="none of PNG, JPEG"):
        images.open_image(encoded(Image.new("RGB", (16, 16)), kind), "x")


def test_a_pointer_in_place_of_a_picture_is_named(tmp_path):
    file = tmp_path / "a.png"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match=r"a\.png as an image \(it is a Git LFS pointer; run git lfs pull\)"):
        images.open_image(file, "here")
