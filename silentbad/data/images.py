"""Images and masks: decoded within bounds, converted, compared by content.

Images are bounded in size before they are decoded, file names cannot leave their folder, and
nothing is executed. Only functions that make tensors import torch, so a command without them starts
within a second."""

from __future__ import annotations

import hashlib
import io
import os
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import (
    Image,
    ImageChops,
    ImageCms,
    ImageFilter,
    ImageOps,
    PngImagePlugin,
    UnidentifiedImageError,
)

from silentbad.errors import UserError, brief, first_line, user_errors, warn
from silentbad.files import is_lfs_pointer, is_utf8, no_file

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 64_000_000  # larger images are refused before they are decoded
MAX_SIDE = 65_535  # and longer ones: a decoder may take ten seconds for one of 6,700,000 by 9
CHUNK = 512  # known pictures that are compared at once
# Share of the side: nothing this near to an element's edge is judged. Only there may training
# pictures hide a backdrop, and generated pictures are soft there.
RIM = 1 / 32
# decoders that may run; others start programs (EPS) or are rare
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
PICTURES = {*(f".{name.lower()}" for name in FORMATS), ".jpg", ".jfif", ".tif"}  # as names end
UNREAD = {".avif", ".heic", ".heif", ".jp2", ".jxl", ".psd"}  # pictures, of other formats
# the mode of the pixels for each colour space of a profile
MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
SRGB = ImageCms.createProfile("sRGB")
TRANSPARENT = "transparent"  # remarks on a picture, in its info["remark"]
FRAMES = "frames"


def _without_large_texts(read: Callable[..., bytes]) -> Callable[..., bytes]:
    """Pillow's reader of a text in a PNG, which leaves out what is over its limits: texts are not
    used, and workflow tools write megabytes of them."""

    def read_text(self: Any, position: int, length: int) -> bytes:
        try:
            return read(self, position, length)
        except ValueError:
            self.fp.seek(position)
            return self.fp.read(length)

    return read_text


for _kind in ("chunk_tEXt", "chunk_zTXt", "chunk_iTXt"):
    _read_text = _without_large_texts(getattr(PngImagePlugin.PngStream, _kind))
    setattr(PngImagePlugin.PngStream, _kind, _read_text)


# ---------------------------------------------------------------- images
def picture_files(folder: Path, endings: Collection[str] = PICTURES) -> list[Path]:
    """The pictures of a folder by name, by how their names end; hidden files are none.

    Raises UserError for a name that is not UTF-8: tables and metadata cannot hold it."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in endings]
    for file in files:
        if not is_utf8(str(file)):
            raise UserError(f"{file}: the name is not UTF-8; rename it")
    return [file for file in files if file.is_file() and not file.name.startswith(".")]


def open_image(source: Path | bytes, where: str) -> Image.Image:
    """An sRGB image: colour profile and EXIF rotation applied, alpha over white, size bounded.

    Its info["remark"] says whether it has TRANSPARENT parts or several FRAMES."""
    image = _upright(source, where)
    remarks = [FRAMES] if image.info.get("frames") else []
    if min(image.size) < 2:
        raise UserError(f"{where}: the image is {_by(image.size)} pixels")
    profile = image.info.get("icc_profile")
    image = _in_8_bit(image, where)
    grey = image.mode in ("1", "L", "LA", "La")
    with _decoding(source, where):
        alpha = None
        if image.has_transparency_data:
            image = image.convert("RGBA")
            alpha = image.getchannel("A")
        image = _in_srgb(image, profile, grey, f"{where}: {_shown(source)}")
        if alpha is not None:
            image.putalpha(alpha)
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            if int(np.asarray(alpha).min()) < 255:
                remarks.append(TRANSPARENT)
        image = image.convert("RGB")
    image.info["remark"] = " ".join(remarks)
    return image


def open_mask(source: Path, size: tuple[int, int], where: str) -> Image.Image:
    """A greyscale mask of its image's size, which shows a region."""
    mask = _upright(source, where)
    if mask.size != size:
        raise UserError(
            f"{where}: mask {source} is {_by(mask.size)}, its image {_by(size)}; "
            f"make them the same size"
        )
    mask = _in_8_bit(mask, where)
    with _decoding(source, where):
        alpha = mask.convert("RGBA").getchannel("A") if mask.has_transparency_data else None
        least = 255 if alpha is None else int(np.asarray(alpha).min())
        grey = mask.convert("L")
    if least < 255:
        raise UserError(
            f"{where}: mask {source} has transparency; save the region in white on black"
        )
    if (most := int(np.asarray(grey).max())) < 128:
        wrong = "is black all over" if most == 0 else f"has values up to {most} of 255"
        raise UserError(f"{where}: mask {source} {wrong}; the element's region is white")
    if int(np.asarray(grey).min()) >= 128:
        raise UserError(f"{where}: mask {source} is white all over; all but the element is black")
    return grey


def alpha_mask(source: Path | bytes, where: str) -> Image.Image | None:
    """The opaque part of a picture as a mask; None where no part of it is, or all."""
    picture = _in_8_bit(_upright(source, where), where)
    with _decoding(source, where):
        alpha = picture.convert("RGBA").getchannel("A")
    levels = np.asarray(alpha)
    return alpha if levels.min() < 128 <= levels.max() else None


def _upright(source: Path | bytes, where: str) -> Image.Image:
    """A decoded image, turned as its EXIF says; where the EXIF is damaged it stays as it is."""
    # Path.is_file raises for names that are too long
    if isinstance(source, Path) and not os.path.isfile(source):
        raise UserError(f"{where}: {no_file(source)}")
    with (
        _decoding(source, where),
        io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
    ):
        image = Image.open(file, formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise UserError(
                f"{where}: {_shown(source)} is {_by(image.size)} pixels, over the limit of "
                f"{MAX_PIXELS}; shrink it"
            )
        if max(image.size) > MAX_SIDE:
            raise UserError(
                f"{where}: {_shown(source)} is {_by(image.size)} pixels, over the limit of "
                f"{MAX_SIDE} a side; cut it"
            )
        # cameras write previews, as MPO
        image.info["frames"] = image.format != "MPO" and getattr(image, "is_animated", False)
        image.load()
        # Pillow's parser of EXIF fails in many ways, and the picture itself is whole
        with suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
        return image


@contextmanager
def _decoding(source: Path | bytes, where: str) -> Iterator[None]:
    """A context for Pillow's decoders: their many kinds of errors become a UserError, their
    warnings are silenced."""
    failed = f"{where}: cannot read {_shown(source)} as an image"
    with warnings.catch_warnings(), user_errors(failed):
        warnings.simplefilter("ignore")
        try:
            yield
        except Image.DecompressionBombError:
            raise UserError(
                f"{where}: {_shown(source)} is over the limit of {MAX_PIXELS} pixels; shrink it"
            ) from None
        except UnidentifiedImageError:
            wrong = f"none of {', '.join(FORMATS)}"
            if isinstance(source, Path) and is_lfs_pointer(source):
                wrong = "a Git LFS pointer; run git lfs pull"
            raise UserError(f"{failed} (it is {wrong})") from None


def _shown(source: Path | bytes) -> str:
    return "image bytes" if isinstance(source, bytes) else str(source)


def _in_srgb(image: Image.Image, profile: bytes | None, grey: bool, named: str) -> Image.Image:
    """The image in sRGB. A profile that cannot be applied is left out, with a warning."""
    if not profile:
        return image.convert("RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = MODES.get(source.profile.xcolor_space)
        if mode is None or (mode == "L" and not grey) or (mode == "CMYK") != (image.mode == "CMYK"):
            raise ValueError(f"it is of {source.profile.xcolor_space.strip()} values")
        converted = ImageCms.profileToProfile(image.convert(mode), source, SRGB, outputMode="RGB")
        return image.convert("RGB") if converted is None else converted
    except Exception as error:  # Pillow and LittleCMS raise many kinds
        reason = first_line(error)
        if reason not in _WARNED:  # warned once: one program may have written the whole folder
            _WARNED.add(reason)
            warn(f"{named}: its colour profile is left out ({reason}), as those of others like it")
        return image.convert("RGB")


_WARNED: set[str] = set()


def _in_8_bit(image: Image.Image, where: str) -> Image.Image:
    """The image, with values of more than 8 bits scaled, in grey."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise UserError(f"{where}: the image holds values that are not finite")
    largest = values.max(initial=0)
    if largest > 65535:
        raise UserError(
            f"{where}: the image holds values up to {largest:g}; save it with 8 or 16 bits"
        )
    scale = 1 / 257 if largest > 255 or ";16" in image.mode else 1.0
    if image.mode == "F" and largest <= 1:
        scale = 255.0
    levels = np.empty(values.shape, dtype=np.uint8)
    # line by line: in double precision the whole takes eight times its memory
    for row, line in enumerate(values):
        levels[row] = np.clip(np.rint(line.astype(np.float64) * scale), 0, 255)
    grey = Image.fromarray(levels, "L")
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray(values != image.info["transparency"]).convert("L"))
    return grey


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def content_hash(image: Image.Image) -> str:
    """SHA-256 of an image's size and pixels, whatever file it came from."""
    return hashlib.sha256(f"{_by(image.size)}/".encode() + image.tobytes()).hexdigest()


def thumbnail(image: Image.Image) -> bytes:
    """The RGB image as 16x16 pixels, 768 bytes: they survive recompression."""
    return image.resize((16, 16), Image.Resampling.BOX).tobytes()


def thumbnails(image: Image.Image) -> bytes:
    """Thumbnails of the parts where a copy may be: the whole, squares of it, inside borders."""
    image = shrunk(image)
    width, height = image.size
    side = min(image.size)
    squares = []
    if width != height:
        for share in range(3):
            left = share * (width - side) // 2
            top = share * (height - side) // 2
            squares.append(image.crop((left, top, left + side, top + side)))
    shown = [image, *squares, *without_border(image), *inner(image, 0.02, 0.05, 0.08)]
    return b"".join(map(thumbnail, shown))


def views(image: Image.Image) -> list[Image.Image]:
    """What a copy may show: the whole, within borders, cut at edges; turned, blurred, in grey."""
    image = shrunk(image)
    shown = [image, *without_border(image), *inner(image, 0.05, 0.1)]
    for m in (0.04, 0.08, 0.12, 0.16, 0.2):
        for box in ((m, 0, 1, 1), (0, m, 1, 1), (0, 0, 1 - m, 1), (0, 0, 1, 1 - m)):
            shown.append(_box(image, *box))
    for share in (0.025, 0.05):
        shown.append(image.filter(ImageFilter.GaussianBlur(share * min(image.size))))
    shown += [image.convert("L").convert("RGB"), ImageOps.invert(image)]
    return [*shown, *(view.transpose(method) for view in shown for method in Image.Transpose)]


def inner(image: Image.Image, *margins: float) -> list[Image.Image]:
    """The image without these shares of its width and height at each edge."""
    return [_box(image, m, m, 1 - m, 1 - m) for m in margins]


def _box(image: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
    width, height = image.size
    size = (16, 16)
    return image.resize(
        size, Image.Resampling.BOX, box=(left * width, top * height, right * width, bottom * height)
    )


def shrunk(image: Image.Image, side: int = 1024) -> Image.Image:
    """An image whose shorter side is under twice `side`, averaged: copies are looked for in it."""
    factor = min(image.size) // side
    return image.reduce(factor) if factor > 1 else image


def without_border(
    image: Image.Image, tolerance: int = 24, share: float = 0.25
) -> list[Image.Image]:
    """The RGB image without plain borders in the colour of its first pixel, of its last pixel, and
    of both in turn. A version is left out if it has no such border, or keeps less than a
    `share`."""
    first = trimmed(image, (0, 0), tolerance)
    last = trimmed(image, (-1, -1), tolerance)
    both = first and trimmed(first, (-1, -1), tolerance)
    distinct = {each.tobytes(): each for each in (first, last, both) if each is not None}
    least = share * image.width * image.height
    return [each for each in distinct.values() if each.width * each.height >= least]


def trimmed(image: Image.Image, corner: tuple[int, int], tolerance: int) -> Image.Image | None:
    """The image without a border of a corner's colour; None where it has none."""
    colour = image.getpixel((corner[0] % image.width, corner[1] % image.height))
    other = ImageChops.difference(image, Image.new("RGB", image.size, colour))
    box = other.point(lambda level: 255 * (level > tolerance)).getbbox()
    return None if box is None or box == (0, 0, *image.size) else image.crop(box)


def safe_path(root: Path, name: Any, where: str, key: str = "") -> Path:
    """`root/name`, refused where it leaves `root`, also through a link."""
    where = f"{where}: {key}" if key else where
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: must be the name of a file, got {brief(name)}")
    if "\0" in name or not is_utf8(name):
        raise UserError(f"{where}: no file can have the name {brief(name)}")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name.startswith("\\"):
        raise UserError(
            f"{where}: absolute path {brief(name)} refused; write it relative to {root}"
        )
    if ".." in PurePosixPath(name.replace("\\", "/")).parts:
        raise UserError(
            f"{where}: path {brief(name)} leaves {root} or goes through '..'; write it without"
        )
    # macOS writes accents apart
    forms = [name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))]
    return inside(
        root, root / next((form for form in forms if os.path.lexists(root / form)), name), where
    )


def inside(root: Path, path: Path, where: str) -> Path:
    """`path`, refused where links lead it out of `root`."""
    home = os.path.realpath(root)
    if os.path.commonpath([home, os.path.realpath(path)]) != home:
        raise UserError(
            f"{where}: path {brief(str(path.relative_to(root)))} leaves {root}; copy what it links "
            "to into it"
        )
    return path


def as_floats(thumb: bytes) -> np.ndarray:
    """Thumbnails as (n,768) in [0,255]."""
    return np.frombuffer(thumb, dtype=np.uint8).astype(np.float32).reshape(-1, 768)


def copies(
    thumbs: np.ndarray, known_thumbs: np.ndarray, rms: float = 8.0, share: float = 0.25
) -> tuple[int, int] | None:
    """(row of thumbs (R,768), row of known_thumbs (T,768)) of the first near copy, or None.

    A copy has the known picture's contrast up to a factor of 2, at any brightness of each colour.
    The remaining difference is less than `rms` levels in the root mean square, and less than a
    `share` of the contrast, so two nearly blank pages are no copies. On the microworld, JPEGs of
    quality 30 and pictures resized by half as much again are 4 to 7 levels away, the nearest of 840
    pictures that share elements with a target over 12."""
    levels = _detail(thumbs)
    thumbs_contrast = (levels**2).mean(1)[:, None]
    for start in range(0, len(known_thumbs), CHUNK):
        some = _detail(known_thumbs[start : start + CHUNK])
        contrast = (some**2).mean(1)[None]
        both = levels @ some.T / thumbs.shape[1]
        gain = np.clip(both / np.maximum(contrast, 1), 0.5, 2)
        left = np.sqrt(np.maximum(thumbs_contrast - 2 * gain * both + gain**2 * contrast, 0))
        near = np.argwhere(left < np.minimum(rms, share * gain * np.sqrt(contrast)))
        if len(near):
            return int(near[0, 0]), start + int(near[0, 1])
    return None


def _detail(thumbs: np.ndarray) -> np.ndarray:
    """Thumbnails (n,768) minus the mean of each colour: zero for a plain picture."""
    colours = thumbs.reshape(len(thumbs), -1, 3)
    return (colours - colours.mean(1, keepdims=True)).reshape(thumbs.shape)


# -- images ----------------------------------------------------------------------------------------
def to_tensor(image: Image.Image) -> Tensor:
    """PIL image -> (3,H,W) in [0,1]; `silentbad.data.images.open_image` decodes files."""
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def to_pil(image: Tensor) -> Image.Image:
    """(3,H,W) in [0,1] or uint8 -> PIL."""
    import torch

    if image.dtype != torch.uint8:
        image = (image.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear with antialiasing to (h, w)."""
    from torch.nn.functional import interpolate

    return interpolate(
        images.float(), size, mode="bilinear", antialias=True, align_corners=False
    ).clamp(0, 1)
