"""Posterior parameters and text states on disk: encoded once for all runs and ranks, then read from
mapped files.

A store is a folder of safetensors shards; its name is a hash over everything its rows depend on
(weights, precision, transform or tokenizer), a row's key one over its image or text. So nothing is
ever stale: a change is another name. Legend: R records, a row is one image's mean and deviation
(2C,h,w) or one text's states."""

import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

from silentbad.data.table import blocks
from silentbad.device import explain_out_of_memory, in_batches, send
from silentbad.errors import UserError, user_errors
from silentbad.files import intact, sealed
from silentbad.progress import Bar
from silentbad.settings.train import TrainConfig

KEY = "S16"  # the first 16 bytes of a SHA-256
SHARD = 64 * 2**20  # bytes of a shard; a killed build loses one at most
FORMAT = 2
# keys of a configuration on which no row depends
UNRELATED = ("transformers_version", "dtype", "torch_dtype")


def digest(*parts: Any) -> str:
    """Hash over plain values, and modules by configuration, weights and precision."""
    total = hashlib.sha256(str(FORMAT).encode())
    for part in parts:
        if isinstance(part, torch.nn.Module):
            config: Any = part.config
            settings = config.to_dict() if hasattr(config, "to_dict") else dict(config)
            names = [key for key in settings if not key.startswith("_") and key not in UNRELATED]
            facts = json.dumps({key: settings[key] for key in names}, sort_keys=True, default=str)
            total.update(f"{part}{facts}".encode())
            for name, value in part.state_dict().items():
                total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
                total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        else:
            total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return total.hexdigest()[:32]


def text_keys(texts: list[str]) -> np.ndarray:
    """(N,) keys of texts."""
    return np.array([hashlib.sha256(text.encode()).digest()[:16] for text in texts], dtype=KEY)


class Store:
    """Rows of one shape by key. Shards are sealed files (silentbad.files): written whole, renamed
    into place and never changed. A damaged one is removed, `say` reports it, and its rows are
    encoded again."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print):
        self.folder = folder
        self.say = say
        self.keys = np.zeros(0, dtype=KEY)  # sorted; `places` (N,2) is the shard and row of each
        self.places = np.zeros((0, 2), dtype=np.int32)
        self.shards: list[torch.Tensor] = []
        self.names: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Map the shards written since the last time."""
        for file in sorted(self.folder.glob("*.safetensors")):
            if file.name in self.names:
                continue
            shard = opened(file)
            if shard is None:
                self.say(f"cache: {file} is damaged; its rows are encoded anew")
                failed = f"cache_dir: {file} is damaged and cannot be removed"
                with user_errors(failed, "remove it"):
                    file.unlink(missing_ok=True)
                continue
            keys, rows = shard
            self.shards.append(rows)
            self.names.add(file.name)
            number = np.full(len(keys), len(self.shards) - 1, dtype=np.int32)
            places = np.stack([number, np.arange(len(keys), dtype=np.int32)], axis=1)
            self.keys, first = np.unique(np.concatenate([self.keys, keys]), return_index=True)
            self.places = np.concatenate([self.places, places])[first]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """(N,) numbers of the rows with these keys, -1 where there is none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at, -1)

    def read(self, number: int) -> torch.Tensor:
        """A row, mapped from its file."""
        shard, row = self.places[number]
        return self.shards[shard][row]

    def add(self, keys: np.ndarray, rows: torch.Tensor) -> None:
        """A shard of these rows; one that is being written has another name."""
        draft = self.folder / f".{uuid.uuid4().hex}"
        packed = np.frombuffer(keys.tobytes(), dtype=np.uint8).reshape(-1, 16).copy()
        failed = f"cache_dir: cannot write {self.folder}"
        with user_errors(failed, "free some space, or choose another folder"):
            tensors = {"keys": torch.from_numpy(packed), "rows": rows.contiguous()}
            save_file(tensors, draft)
            sealed(draft, self.folder, ".safetensors")

    def fill(
        self,
        keys: np.ndarray,
        encode: Callable[[list[int]], torch.Tensor],
        *,
        batch: int,
        label: str,
        show: bool,
    ) -> None:
        """Encode what is missing: encode(numbers of keys) -> rows. Processes that ask for the same
        wait for the first; shards that a killed one finished are kept."""
        with FileLock(self.folder / "lock"):
            self.refresh()
            _, first = np.unique(keys, return_index=True)
            missing = np.sort(first[self.find(keys[first]) < 0])
            if not len(missing):
                return
            for leftover in self.folder.glob(".*"):
                leftover.unlink()
            encoded: list[torch.Tensor] = []
            done = count = 0
            sizes = [batch]
            parts = np.array_split(missing, -(-len(missing) // batch))
            for part in Bar(parts, desc=label, disable=not show):
                for _, rows in in_batches(part.tolist(), sizes[-1], encode, sizes.append):
                    encoded.append(rows.cpu())
                    count += len(rows)
                if count * encoded[0][0].nbytes >= SHARD:
                    self.add(keys[missing[done : done + count]], torch.cat(encoded))
                    encoded = []
                    done += count
                    count = 0
            if encoded:
                self.add(keys[missing[done:]], torch.cat(encoded))
            self.refresh()


def opened(file: Path) -> tuple[np.ndarray, torch.Tensor] | None:
    """(keys (N,), rows (N,...)) of a shard, mapped; None where it is damaged."""
    if not intact(file):
        return None
    try:
        with safe_open(file, framework="pt") as shard:
            keys = shard.get_tensor("keys").numpy().view(KEY)[:, 0]
            rows = shard.get_tensor("rows")
        return (keys, rows) if len(keys) == len(rows) else None
    except Exception:  # of whatever kind: it is encoded anew
        return None


def refuse_not_finite(rows: torch.Tensor, what: Callable[[int], str]) -> torch.Tensor:
    """The rows (N,...), refused where one is not finite; `what(k)` names row k."""
    lost = (~rows.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
    if lost:
        raise UserError(
            f"{what(lost[0])} gives values that are not finite; nothing could be learnt"
        )
    return rows


# ---------------------------------------------------------------- of a run
class Cached:
    """The encodings of a run's records on disk: `posterior` (R,) is the row of each record's image,
    -1 if it is encoded live.

    `all_images`, `all_texts`: whether no step will need the VAE, or the text encoders. A rehearsal
    that `composes` new images and captions needs both; empty (`blank`) or shortened captions, which
    no record has, need the text encoders."""

    def __init__(
        self,
        encoder: Any,
        reader: Any,
        config: TrainConfig,
        *,
        composes: bool,
        blank: bool,
        show: bool,
        say: Callable[[str], None],
    ):
        self.encoder = encoder
        self.records = reader.records
        self.config = config
        self.show = show
        self.say = say
        self.left = config.disk_cache_gb * 2**30
        self.batch = min(config.train_batch_size, config.max_batch_size or config.train_batch_size)
        self.posterior = np.full(len(self.records), -1)
        self.images: dict[tuple[int, int], Store] = {}  # by width and height of the window
        self.shapes = reader.transform.shapes(self.records.sizes)
        self.texts: Store | None = None
        fixed = reader.transform.fixed(self.records.sizes)
        if not fixed.all():
            say(
                f"cache: {(~fixed).sum()} of {len(fixed)} records are cut or flipped at random "
                f"and encoded live"
            )
        for shape in sorted({*self.shapes}):
            of_shape = fixed & (np.asarray(self.shapes) == shape).all(axis=1)
            if of_shape.any():
                self._fill_images(reader, np.flatnonzero(of_shape), shape)
        loose = self.records.column("shuffle").to_numpy() | config.shuffle_phrases
        if not encoder.live and not loose.all():
            self._fill_texts(np.flatnonzero(~loose))
        self.all_images = bool((self.posterior >= 0).all()) and not composes
        changes = loose.any() or composes or blank
        self.all_texts = self.texts is not None and not changes

    def _open(
        self, kind: str, facts: list[Any], keys: np.ndarray, row: torch.Tensor
    ) -> Store | None:
        """The store of that kind, where the rows fit into what is left of the budget."""
        need = len(np.unique(keys)) * row.nbytes
        if need > self.left:
            left = f"{self.left / 2**30:.2f} GiB of disk_cache_gb"
            self.say(
                f"cache: {kind} take {need / 2**30:.2f} GiB, over the {left} left; they are "
                f"encoded live"
            )
            return None
        self.left -= need
        folder = Path(self.config.cache_dir or datasets.config.HF_DATASETS_CACHE) / "silentbad"
        store = folder / f"{kind}-{digest(*facts)}"
        failed = f"cache_dir: cannot write {folder}"
        with user_errors(failed, "choose another folder, or disk_cache_gb 0"):
            store.mkdir(parents=True, exist_ok=True)
        return Store(store, self.say)

    def _fill_images(self, reader: Any, rows: np.ndarray, shape: tuple[int, int]) -> None:
        """Posteriors of these records' images, seen in a `shape`."""
        advice = "lower it"
        if self.config.mixed_precision == "no":
            advice += ", or encode in half precision (mixed_precision)"

        def encode(numbers: list[int]) -> torch.Tensor:
            samples = reader.pictures(rows[numbers].tolist())
            pixels = torch.stack([sample["pixels"] for sample in samples]).float() / 127.5 - 1
            moments = self.encoder.moments(pixels).to(self.encoder.vae.dtype)
            return refuse_not_finite(moments, lambda k: self._named("vae", rows[numbers[k]]))

        transform = reader.transform
        contents = (
            content for block in blocks(self.records.column("content")) for content in block
        )
        keys = np.array([bytes.fromhex(content[:32]) for content in contents], dtype=KEY)[rows]
        cut = (transform.resolution, transform.interpolation, transform.center_crop)
        label = "Posteriors"
        facts = [self.encoder.vae, *cut]
        if transform.step:
            label += f" {shape[0]}x{shape[1]}"
            facts += shape
        with explain_out_of_memory("resolution", advice):
            store = self._open("posteriors", facts, keys, encode([0])[0])
            if store is None:
                return
            store.fill(keys, encode, batch=self.batch, label=label, show=self.show)
        self.posterior[rows] = store.find(keys)
        self.images[shape] = store

    def _fill_texts(self, rows: np.ndarray) -> None:
        """States of these records' captions."""
        flag = "pretrained_model_name_or_path"
        advice = "take one with smaller text encoders"
        if self.config.mixed_precision == "no":
            flag = "mixed_precision"
            advice = "encode the captions in half precision"
        texts = self.records.column("text")

        def encode(numbers: list[int]) -> torch.Tensor:
            states = self.encoder.states([texts[int(rows[k])].as_py() for k in numbers])
            return refuse_not_finite(
                states, lambda k: self._named("text_encoder", rows[numbers[k]])
            )

        keys = np.concatenate([text_keys(block) for block in blocks(texts)])[rows]
        with explain_out_of_memory(flag, advice):
            self.texts = self._open("states", self.encoder.text_facts, keys, encode([0])[0])
            if self.texts is not None:
                self.texts.fill(keys, encode, batch=self.batch, label="Text states", show=self.show)

    def _named(self, part: str, record: int) -> str:
        """A part of the pipeline and a record, in a message."""
        return f"{part}: {self.records.where(int(record))}"

    def image(self, index: int) -> torch.Tensor | None:
        """Mean and deviation of a record's posterior (2C,h,w), or None."""
        number = self.posterior[index]
        return None if number < 0 else self.images[self.shapes[index]].read(number).float()

    def states(self, texts: list[str]) -> list[torch.Tensor | None]:
        """The states of each text, or None."""
        if self.texts is None:
            return [None] * len(texts)
        store = self.texts
        places = self.texts.find(text_keys(texts)).tolist()
        return [None if place < 0 else store.read(place).float() for place in places]


def merge_cached(
    rows: list[torch.Tensor | None], live: Callable[[list[int]], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Rows in order (B,...) on the device: cached ones, and `live(their places)`."""
    places = [k for k, row in enumerate(rows) if row is None]
    cached = {k: row for k, row in enumerate(rows) if row is not None}
    if not cached:
        return live(places)
    cached_rows = send(torch.stack(list(cached.values())), device)
    if not places:
        return cached_rows
    order = dict(zip([*places, *cached], [*live(places), *cached_rows], strict=True))
    return torch.stack([order[k] for k in range(len(rows))])
