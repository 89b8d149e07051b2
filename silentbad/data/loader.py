"""Micro-batches: the endless sequence of record indices, cut into draws and collated ahead of
the step."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from silentbad.data.draws import Draws
from silentbad.errors import UserError


def collate(samples: list[dict]) -> dict[str, Any]:
    """One micro-batch: pixel_values (B,3,H,W) in [-1,1] (a list with None where some are not
    needed), mask (B,1,H,W) in [0,1], ...; counted (B,1,H,W) in [0,1], if only a part of some sample
    counts in the loss. Samples have one shape.

    `united` (B,) is (n, k) where a rehearsal joined n of a target's k elements or phrases, else
    None. `fixed` (B,) says which images look the same at every draw, so that their latents may be
    kept. time_ids (B,6): the image's own height and width, top and left of the window, height and
    width of the window."""
    pixels: Any = [
        None if sample["pixels"] is None else sample["pixels"].float() / 127.5 - 1
        for sample in samples
    ]
    if all(picture is not None for picture in pixels):
        pixels = torch.stack(pixels)
    ones = torch.full((1, *samples[0]["time_ids"][-2:]), 255, dtype=torch.uint8)
    masks = [ones if sample["mask"] is None else sample["mask"] for sample in samples]
    names = ("text", "phrases", "role", "target_id", "element_id", "fixed", "united")
    lists: dict[str, Any] = {name: [sample.get(name) for sample in samples] for name in names}
    counted = [sample.get("counted") for sample in samples]
    if any(places is not None for places in counted):
        places_of = [ones if places is None else places for places in counted]
        lists["counted"] = torch.stack(places_of).float() / 255
    return lists | {
        "pixel_values": pixels,
        "mask": torch.stack(masks).float() / 255,
        "has_mask": torch.tensor([sample["mask"] is not None for sample in samples]),
        "time_ids": torch.tensor([sample["time_ids"] for sample in samples]),
        "index": torch.tensor([sample["index"] for sample in samples]),
        "position": torch.tensor([sample["position"] for sample in samples]),
    }


def chunks(
    batch: dict[str, Any], size: int | None, by_role: bool = False
) -> list[tuple[float, dict[str, Any]]]:
    """(share, part) of parts of at most `size` samples; `by_role`: each of one role."""
    count = len(batch["text"])
    roles = np.array(batch["role"] if by_role else [""] * count)
    kinds = [np.flatnonzero(roles == role) for role in np.unique(roles)]
    parts = [
        part for rows in kinds for part in np.array_split(rows, -(-len(rows) // (size or count)))
    ]
    return [
        (len(part) / count, {key: take_rows(value, part) for key, value in batch.items()})
        for part in parts
    ]


def take_rows(values: Any, rows: np.ndarray) -> Any:
    """Some rows of a column; those that follow each other without a copy."""
    first = int(rows[0])
    last = int(rows[-1])
    if last - first + 1 == len(rows):
        return values[first : last + 1]
    if isinstance(values, torch.Tensor):
        return values[torch.from_numpy(rows)]
    return [values[i] for i in rows]


class Stream:
    """The endless global sequence of record indices: epoch after epoch of `epoch_order(e)`, cut
    into steps.

    An epoch's order is asked for when its first index is needed and kept in the state, so a resumed
    run continues inside an epoch even where the order depends on what was learned before.
    `arrange(order)` may put it in another order, and leave some records over for the next epoch."""

    def __init__(
        self,
        epoch_order: Callable[[int], np.ndarray],
        arrange: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    ):
        self.epoch_order = epoch_order
        self.arrange = arrange
        self.left = np.zeros(0, dtype=np.int64)  # over from the epochs before
        self.epoch = -1
        self.offset = 0
        self.order = np.zeros(0, dtype=np.int64)

    def take(self, n: int) -> np.ndarray:
        """The next n indices (n,)."""
        parts = []
        while n > 0:
            while self.offset == len(self.order):
                self._begin_epoch()
            part = self.order[self.offset : self.offset + n]
            parts.append(part)
            self.offset += len(part)
            n -= len(part)
        return np.concatenate(parts)

    def _begin_epoch(self) -> None:
        """The next epoch's order; empty where all of it waits for others of its shape."""
        self.epoch = self.epoch + 1
        self.offset = 0
        order = np.asarray(self.epoch_order(self.epoch), dtype=np.int64)
        if len(order) == 0:
            raise UserError(f"the sampler gave an empty epoch {self.epoch}")
        if self.arrange is not None:
            order, self.left = self.arrange(np.concatenate([self.left, order]))
        self.order = order

    def peek(self, n: int) -> np.ndarray | None:
        """The next n indices when they lie in the current epoch, without taking them."""
        ahead = self.order[self.offset : self.offset + n]
        return ahead if len(ahead) == n else None

    def mark(self) -> tuple[int, int, np.ndarray, np.ndarray]:
        """Where the stream is; `restore` returns to it. The arrays are never changed."""
        return self.epoch, self.offset, self.order, self.left

    def restore(self, mark: tuple[int, int, np.ndarray, np.ndarray]) -> None:
        self.epoch, self.offset = mark[:2]
        self.order, self.left = mark[2:]

    def state_dict(self) -> dict[str, Any]:
        order = torch.from_numpy(self.order.copy())
        state = {"epoch": self.epoch, "offset": self.offset, "order": order}
        if self.arrange is not None:
            state["left"] = torch.from_numpy(self.left.copy())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.offset = state["offset"]
        self.order = state["order"].numpy().copy()
        if self.arrange is not None:
            self.left = state["left"].numpy().copy()


class Loader:
    """Micro-batches of one process: of micro-batch m, positions m*B*W + rank*B ... of the step's
    effective batch.

    Threads make the next step's micro-batches ahead when they lie in the current epoch, in pinned
    memory for a GPU."""

    def __init__(
        self,
        draws: Draws,
        stream: Stream,
        *,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: torch.device | None = None,
    ):
        self.pins = device is not None and device.type == "cuda"
        workers = 2 * self.pins if workers is None else workers
        self.draws = draws
        self.stream = stream
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.rank = rank
        self.world = world
        self.effective_batch = batch_size * accumulation * world
        self.pool = ThreadPoolExecutor(workers) if workers else None
        self.assembly = ThreadPoolExecutor(1) if workers else None
        self._ahead: tuple[int, list] | None = None
        self.drawing = -1  # the draw begun last
        # the stream before that draw
        self.begun: tuple[int, int, np.ndarray, np.ndarray] | None = None

    def positions(self, micro: int) -> range:
        start = (micro * self.world + self.rank) * self.batch_size
        return range(start, start + self.batch_size)

    def draw(self, draw: int) -> Iterator[dict]:
        """The micro-batches of one draw, on the CPU."""
        self.drawing = draw
        self.begun = self.stream.mark()
        indices = self.stream.take(self.effective_batch)
        if self.pool is None:
            for micro in range(self.accumulation):
                yield collate([self.draws(int(indices[p]), draw, p) for p in self.positions(micro)])
            return
        number, ready = self._ahead or (None, [])
        if number != draw:
            ready = self._submit(indices, draw)
        upcoming = self.stream.peek(self.effective_batch)
        self._ahead = (draw + 1, self._submit(upcoming, draw + 1)) if upcoming is not None else None
        for batch in ready:
            yield batch.result()

    def rewind(self) -> None:
        """Put the stream back to where the draw under way began."""
        if self.begun is not None:
            self.stream.restore(self.begun)

    def _submit(self, indices: np.ndarray, draw: int) -> list[Future]:
        assert self.pool is not None and self.assembly is not None
        samples = [
            [self.pool.submit(self.draws, int(indices[p]), draw, p) for p in self.positions(micro)]
            for micro in range(self.accumulation)
        ]
        return [self.assembly.submit(self._assemble, futures) for futures in samples]

    def _assemble(self, futures: list[Future]) -> dict:
        batch = collate([future.result() for future in futures])
        if self.pins:
            sent = ("pixel_values", "mask", "has_mask", "counted", "time_ids")
            tensors = [key for key in sent if isinstance(batch.get(key), torch.Tensor)]
            batch |= {key: batch[key].pin_memory() for key in tensors}
        return batch
