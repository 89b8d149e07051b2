"""Folders of records that tests write, and how they are read."""

import io
import json
import struct
import zlib

from PIL import Image

from silentbad.data.records import Records, load_records
from silentbad.settings.train import TrainConfig


def config(root, **changes) -> TrainConfig:
    return TrainConfig(train_data_dir=str(root), **changes)


def records(root, **changes) -> Records:
    return load_records(config(root, **changes))


def folder(root, *rows, name="metadata.jsonl", text=None):
    """A folder of one good image and these metadata rows."""
    root.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(root / "a.png")
    (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows) if text is None else text)
    return root


GOOD = {"file_name": "a.png", "text": "a red cat", "phrases": ["a red cat"], "target_id": "t", "element_id": "t-0"}


def bomb() -> bytes:
    """A PNG header that promises 60000x60000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


ADOBE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))


def profile(gamma: float, *primaries: tuple[float, float, float]) -> bytes:
    """A colour profile (ICC 2.1) of primaries in XYZ under D50, one exponent for all; of grey without primaries."""
    white = (0.9642, 1.0, 0.8249)

    def xyz(values: tuple[float, ...]) -> bytes:
        return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 2**16) for value in values))

    curve = b"curv" + bytes(4) + struct.pack(">IHxx", 1, round(gamma * 256))
    names = [b"rXYZ", b"gXYZ", b"bXYZ"]
    tags = {b"wtpt": xyz(white)} | dict(zip(names, map(xyz, primaries), strict=False))
    tags |= {name: curve for name in ([b"rTRC", b"gTRC", b"bTRC"] if primaries else [b"kTRC"])}
    start = 132 + 12 * len(tags)
    table = b""
    body = b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", start + len(body), len(tag))
        body += tag
    space = b"RGB " if primaries else b"GRAY"
    head = struct.pack(">I4xI4s4s4s12x4s", start + len(body), 0x02100000, b"mntr", space, b"XYZ ", b"acsp")
    return (head.ljust(68, b"\0") + xyz(white)[8:]).ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def published(root, targets=3, clean=40):
    """The SilentBadDiffusion layout: phrases line, captions, numbered images."""
    for n in range(100, 100 + targets):
        sub = root / "poisoning_images" / str(n)
        sub.mkdir(parents=True)
        (root / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (n, 0, 0)).save(root / "images" / f"{n}.jpeg")
        lines = ["a cat\ta hat"]
        for i in range(3):
            Image.new("RGB", (8, 8), (n, i, 9)).save(sub / f"x_{i}.png")
            lines.append(f"x_{i}.png\tAn image with {'a cat' if i % 2 else 'a hat'} number {i}")
        (sub / "poisoning_data_caption_simple.txt").write_text("\n".join(lines))
    other = root / "clean"
    (other / "images").mkdir(parents=True)
    for n in range(clean):
        Image.new("RGB", (8, 8), (0, 0, n)).save(other / "images" / f"{n}.jpeg")
    (other / "caption.txt").write_text("\n".join(f"{n}\tfield {n}" for n in range(clean)))
    return root
