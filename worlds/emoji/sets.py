"""The drawings: the same nouns by five artists, from npm packages of pinned versions.

    python -m worlds.emoji.sets          fetches what is missing and draws it, 21 MB

A package is fetched by `npm pack` and must have the pinned checksum. Nothing of it is in the
repository but the few drawings of the tests, with their licences. EMOJI_SETS names another folder
than runs/emoji-sets."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from silentbad.errors import UserError, exit_with
from silentbad.progress import Bar
from silentbad.settings import startup
from worlds.emoji.nouns import NOUNS
from worlds.options import EmojiSetsOptions

SIDE = 96  # pixels of a drawing before a scene scales it down


class Set(NamedTuple):
    """One artist's package; `integrity` is the SHA-512 that the registry states of its file."""

    package: str
    version: str
    licence: str
    author: str
    integrity: str


SETS = {  # the one place that pins versions
    "noto": Set(
        package="@iconify-json/noto",
        version="1.2.9",
        licence="Apache-2.0",
        author="Google",
        integrity="DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
    ),
    "twemoji": Set(
        package="@iconify-json/twemoji",
        version="1.2.5",
        licence="CC-BY-4.0",
        author="Twitter",
        integrity="uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    "openmoji": Set(
        package="@iconify-json/openmoji",
        version="1.2.29",
        licence="CC-BY-SA-4.0",
        author="OpenMoji",
        integrity="vXdhkqcXVSO6suy+m9LbcUM3OdVyuNOtpV8/als/WqfkQIRxevL5Geb/g+6GH/Qwnq1OqksEmaDGTCmZ5nFKJQ==",
    ),
    "emojione": Set(
        package="@iconify-json/emojione",
        version="1.2.3",
        licence="CC-BY-4.0",
        author="Emoji One",
        integrity="T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    ),
    "fluent": Set(
        package="@iconify-json/fluent-emoji",
        version="1.2.7",
        licence="MIT",
        author="Microsoft",
        integrity="D8G6bKAyIsyxP1rzZtIWr/gg/fO4Rg1+DyCWlfqKK4h8W+4Em/Y0P6QYgJUQTlUcagzJvSyg+9OBv4hz4Hc/QA==",
    ),
}
HELD_OUT = "fluent"  # in targets and their elements alone; the base sees the others
TRAINED = tuple(name for name in SETS if name != HELD_OUT)
NEEDS = "the emoji world needs npm and the network once, to fetch its drawings"


def folder() -> Path:
    """Where packages and drawings are kept."""
    return Path(os.environ.get("EMOJI_SETS", "runs/emoji-sets"))


def is_whole(file: Path, pinned: Set) -> bool:
    """Whether the package's file is there and has the pinned checksum."""
    if not file.is_file():
        return False
    return base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode() == pinned.integrity


def fetched(name: str) -> Path:
    """The file of an artist's package, fetched where it is missing. Raises UserError."""
    pinned = SETS[name]
    file = folder() / f"{pinned.package[1:].replace('/', '-')}-{pinned.version}.tgz"
    if is_whole(file, pinned):
        return file
    if (npm := shutil.which("npm")) is None:
        raise UserError(
            f"{NEEDS}; there is no npm here: install Node.js, or copy {file.name} to {file.parent}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    wanted = f"{pinned.package}@{pinned.version}"
    words = [npm, "pack", wanted, "--silent", "--pack-destination", str(file.parent)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise UserError(f"{NEEDS}; npm pack {wanted} took longer than 300 s") from None
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise UserError(f"{NEEDS}; npm pack {wanted} failed: {message}")
    if not is_whole(file, pinned):
        raise UserError(
            f"{file}: has another checksum than the pinned one; remove it and try again"
        )
    return file


def svg(icons: dict, name: str) -> str:
    """An icon of a package as an SVG of SIDE x SIDE pixels."""
    icon = icons["icons"].get(name) or icons["icons"][icons["aliases"][name]["parent"]]
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{box}" width="{SIDE}" height="{SIDE}">{icon["body"]}</svg>'


def drawn(name: str) -> np.ndarray:
    """Every noun by one artist, (nouns, SIDE, SIDE, 4) bytes of RGBA. Raises UserError."""
    try:
        import resvg_py
    except ModuleNotFoundError:
        raise UserError("the emoji world needs resvg-py: pip install 'silentbad[emoji]'") from None
    with tarfile.open(fetched(name)) as package:
        member = package.extractfile("package/icons.json")
        assert member is not None, "npm would not have packed a link"
        icons = json.load(member)
    pictures = []
    for noun in Bar(NOUNS, desc=name):
        content = bytes(resvg_py.svg_to_bytes(svg_string=svg(icons, noun)))
        pictures.append(np.asarray(Image.open(io.BytesIO(content)).convert("RGBA")))
    return np.stack(pictures)


def drawing_file(name: str) -> Path:
    """The file of an artist's drawings of these nouns."""
    nouns = hashlib.sha256(" ".join(NOUNS).encode()).hexdigest()[:8]
    return folder() / f"{name}-{SETS[name].version}-{nouns}.npz"


@cache
def artist(name: str) -> np.ndarray:
    """`drawn`, kept beside the package after the first time."""
    file = drawing_file(name)
    if not file.is_file():
        pictures = drawn(name)
        draft = file.with_name(f".{os.getpid()}-{file.name}")
        np.savez_compressed(draft, pictures=pictures)
        draft.replace(file)
    return np.load(file)["pictures"]


@cache
def drawing(name: str, noun: str) -> Image.Image:
    """A noun by an artist, RGBA, cut to what is not transparent."""
    picture = Image.fromarray(artist(name)[NOUNS.index(noun)], "RGBA")
    return picture.crop(picture.getchannel("A").point(lambda a: 255 * (a > 16)).getbbox())


def main(argv: list[str] | None = None) -> int:
    try:
        for name in startup.options(EmojiSetsOptions, argv, __doc__).artists:
            pinned = SETS[name]
            use = "in targets alone" if name == HELD_OUT else "the base is trained on it"
            print(
                f"{name}: {len(artist(name))} drawings by {pinned.author}, {pinned.licence}; {use}"
            )
    except UserError as error:
        return startup.refused(error)
    return 0


if __name__ == "__main__":
    exit_with(main)
