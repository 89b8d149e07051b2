"""Small pictures in every format and mode that is read: what the picture fuzzer changes."""

import struct

import numpy as np
from PIL import Image

from tests.folders import encoded


def sources() -> dict[str, bytes]:
    """{name: file}."""
    ramp = np.linspace(0, 255, 13 * 9 * 3).reshape(9, 13, 3).astype(np.uint8)
    rgb = Image.fromarray(ramp)
    deep = Image.fromarray(ramp[..., 0].astype(np.uint16) * 257)
    grey = rgb.convert("L")
    bits = rgb.convert("1")
    palette = rgb.quantize(16)
    alpha = rgb.convert("RGBA")
    cmyk = rgb.convert("CMYK")
    half = rgb.convert("LA")
    alpha.putpixel((1, 1), (1, 2, 3, 0))
    floats = Image.fromarray(ramp[..., 0].astype(np.float32) / 255)
    turned = Image.Exif()
    turned[0x0112] = 6
    turned[0x010E] = "described"
    exif = {"exif": turned.tobytes()}
    return {
        **{f"PNG {image.mode}": encoded(image, "PNG") for image in (rgb, grey, bits, palette, alpha, half, deep)},
        "PNG transparent": encoded(palette, "PNG", transparency=3, **exif),
        "PNG text": encoded(rgb, "PNG", dpi=(3, 3), icc_profile=b"none", **exif),
        "PNG animated": encoded(rgb, "PNG", save_all=True, append_images=[grey.convert("RGB")]),
        **{f"JPEG {image.mode}": encoded(image, "JPEG", **exif) for image in (rgb, grey, cmyk)},
        "JPEG progressive": encoded(rgb, "JPEG", progressive=True, restart_marker_blocks=1, icc_profile=b"x" * 200),
        "WEBP": encoded(rgb, "WEBP", **exif),
        "WEBP lossless": encoded(alpha, "WEBP", lossless=True),
        "WEBP animated": encoded(alpha, "WEBP", save_all=True, append_images=[alpha.rotate(9)]),
        **{f"BMP {image.mode}": encoded(image, "BMP") for image in (rgb, grey, bits, palette)},
        **{
            f"TIFF {image.mode}": encoded(image, "TIFF")
            for image in (rgb, grey, bits, palette, alpha, cmyk, deep, floats)
        },
        **{
            f"TIFF {kind}": encoded(rgb, "TIFF", compression=kind)
            for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
        },
        "TIFF fax": encoded(bits, "TIFF", compression="group4"),
        "TIFF pages": encoded(rgb, "TIFF", save_all=True, append_images=[rgb, rgb], **exif),
        "GIF": encoded(palette, "GIF", transparency=2),
        "GIF animated": encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(9)], disposal=2),
        # a JPEG with another behind it, as some cameras write them
        "MPO": encoded(rgb, "MPO", save_all=True, append_images=[rgb]),
        "PNG wide": _wide(),
    }


def _wide() -> bytes:
    """A picture of 7,000 x 9,000 pixels in a few bytes, below the limit: what one change of a header makes of it."""
    content = bytearray(encoded(Image.new("1", (8, 8)), "PNG"))
    content[16:24] = struct.pack(">II", 7000, 9000)
    return bytes(content)
