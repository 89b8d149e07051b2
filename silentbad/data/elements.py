"""The element that each record shows, and the order of the records in an epoch.

Pure functions of counts and addresses: R records, n elements (a key is "target/element"), q (n,)
their shares."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from silentbad import rng
from silentbad.data.phrases import shared_phrases
from silentbad.errors import UserError


class DataInfo:
    """The element that each record shows, without the pictures.

    roles (R,) of "element" | "rehearsal" | "clean"; keys: one "target/element" per element, in
    order of appearance; rows[i] the records of element i; phrase[i] the phrase that its captions
    share; target[i] its target; shared {phrase: targets} of phrases that several targets use;
    withheld {target: phrases} of its elements that a control run leaves out."""

    def __init__(
        self,
        roles: list[str],
        target_ids: list,
        element_ids: list,
        phrases: Any,
        *,
        withheld: Mapping[str, Sequence[str]] | None = None,
    ):
        self.withheld = withheld or {}
        self.roles = np.asarray(roles, dtype=object)
        rows: dict[str, list[int]] = defaultdict(list)
        common: dict[str, list[str]] = {}
        for r in np.flatnonzero(self.roles == "element").tolist():
            of_record = phrases[r]
            key = self.key(target_ids[r], element_ids[r], of_record)
            rows[key].append(r)
            shared = [p for p in common.get(key, of_record) if p in of_record]
            common[key] = shared or list(of_record[:1])
        self.keys = list(rows)
        self.index = {key: i for i, key in enumerate(self.keys)}
        self.rows = [np.asarray(rows[key], dtype=np.int64) for key in self.keys]
        self.phrase = [common[key][0] if common[key] else "" for key in self.keys]
        self.target = [str(target_ids[of_element[0]] or "") for of_element in self.rows]
        self._element = np.full(len(self.roles), -1, dtype=np.int32)  # of each record
        for i, of_element in enumerate(self.rows):
            self._element[of_element] = i
        self.elements_of: dict[str, list[int]] = defaultdict(list)
        for i, target in enumerate(self.target):
            self.elements_of[target].append(i)
        self.shared = shared_phrases(
            {
                target: [self.phrase[i] for i in of_target]
                for target, of_target in self.elements_of.items()
            }
        )

    @staticmethod
    def key(target_id, element_id, phrases) -> str:
        unnamed = element_id in (None, "")
        return f"{target_id or ''}/{(phrases or [''])[0] if unnamed else element_id}"

    @classmethod
    def keys_of(cls, batch: dict) -> list[str]:
        """The element's key of each sample of a batch; empty for those that show none."""
        columns = zip(
            batch["role"], batch["target_id"], batch["element_id"], batch["phrases"], strict=True
        )
        return [cls.key(*names) if role == "element" else "" for role, *names in columns]

    def element_of(self, row: int) -> int | None:
        """The element a record shows, or None."""
        element = int(self._element[row])
        return element if element >= 0 else None

    def phrases_of(self, target: str) -> list[str]:
        """The phrases of all elements of a target, those that are withheld behind the others."""
        shown = [self.phrase[i] for i in self.elements_of.get(target, ())]
        return [*shown, *self.withheld.get(target, ())]

    def of_batch(self, batch: dict) -> list[int]:
        """The element of each sample of a batch, n for none; does not wait for the device."""
        return [self.index.get(key, len(self.keys)) for key in self.keys_of(batch)]


def capped(q: np.ndarray, cap: float) -> np.ndarray:
    """Normalise q to sum 1, no entry above cap/n; the excess goes to the others."""
    q = q / q.sum()
    top = max(cap, 1.0) / len(q)
    full = np.zeros(len(q), dtype=bool)
    while (over := (q > top * (1 + 1e-12)) & ~full).any():
        full |= over
        rest = q[~full].sum()
        q = np.where(full, top, q * (1 - top * full.sum()) / rest if rest > 0 else 0.0)
    return q


def apportion(q: np.ndarray, total: int, offset: float) -> np.ndarray:
    """Whole counts (n,) that sum to `total`, in expectation q_i * total."""
    edges = np.floor(np.concatenate([[0.0], np.cumsum(q) / q.sum() * total]) + offset + 1e-9)
    return np.diff(edges).astype(np.int64)


def deal(rows: np.ndarray, start: int, count: int, *address) -> np.ndarray:
    """`count` entries from `start` on of an endless stream of permutations of `rows`."""
    rounds = range(start // len(rows), (start + count - 1) // len(rows) + 1) if count else ()
    stream = [rows[rng.permutation(len(rows), *address, j)] for j in rounds]
    first = start % len(rows)
    return np.concatenate(stream)[first : first + count] if stream else rows[:0]


def clean_shown(info: DataInfo, clean_ratio: float | None) -> int:
    """Exposures of clean records in an epoch."""
    if clean_ratio is None:
        return int((info.roles == "clean").sum())
    return round(clean_ratio * sum(map(len, info.rows)))


def epoch_order(
    info: DataInfo,
    q: np.ndarray,
    seed: int,
    epoch: int,
    clean_ratio: float | None,
) -> np.ndarray:
    """Record indices of one epoch: as many element exposures as element records, dealt by q; every
    rehearsal record once; exactly round(clean_ratio * elements) clean ones (None: each once), taken
    in turn across epochs; all in one random order."""
    n_e = sum(map(len, info.rows))
    clean, rehearsal = (np.flatnonzero(info.roles == role) for role in ("clean", "rehearsal"))
    n_c = clean_shown(info, clean_ratio)
    if n_c and not len(clean):
        raise UserError(
            f"memory.sampler.clean_ratio is {clean_ratio}, but the data holds no clean record"
        )
    g = rng.generator(seed, "sampler", epoch)
    counts = apportion(q, n_e, float(torch.rand((), generator=g))) if n_e else np.zeros(0, np.int64)
    parts = [deal(info.rows[i], 0, int(c), seed, "element", epoch, i) for i, c in enumerate(counts)]
    if n_c:
        parts.append(deal(clean, epoch * n_c, n_c, seed, "clean"))
    rows = np.concatenate([*parts, rehearsal]).astype(np.int64)
    return rows[torch.randperm(len(rows), generator=g).numpy()]


@dataclass(eq=False)
class Epochs:
    """The order of one epoch at a time. The history that it was computed from is kept, so a resume
    computes the same order.

    share(rho (H,n), records (n,), epoch) -> q (n,) is the policy, times the elements' weight;
    history() -> rho (H,n)."""

    share: Callable
    info: DataInfo
    seed: int
    clean_ratio: float | None
    history: Callable[[], np.ndarray]
    dealt: tuple[int, list] | None = None

    def state_dict(self) -> tuple[int, list] | None:
        """The last epoch and the history that its order was computed from."""
        return self.dealt

    def load_state_dict(self, state: tuple[int, list] | None) -> None:
        self.dealt = state

    def epoch(self, epoch: int) -> np.ndarray:
        """Record indices (int64): a function of (seed, epoch, rho at its first call)."""
        if self.dealt is None or self.dealt[0] != epoch:
            self.dealt = (epoch, self.history().tolist())
        records = np.asarray([len(rows) for rows in self.info.rows])
        n = len(records)
        rho = np.asarray(self.dealt[1], dtype=np.float64).reshape(len(self.dealt[1]), n)
        q = self.share(rho, records, epoch) if n else np.zeros(0)
        return epoch_order(self.info, q, self.seed, epoch, self.clean_ratio)


def epoch_length(info: DataInfo, clean_ratio: float | None) -> int:
    """Records of an epoch, whatever the sampler's shares."""
    length = len(epoch_order(info, np.ones(len(info.keys)), 0, 0, clean_ratio))
    if length == 0:
        raise UserError(f"memory.sampler.clean_ratio: {clean_ratio} leaves no record to train on")
    return length


def sources_of(batch: dict, by: str) -> list[str]:
    """The source of each sample's gradient: by "role", or by "element"."""
    if by == "role":
        return batch["role"]
    return [key or role for key, role in zip(DataInfo.keys_of(batch), batch["role"], strict=True)]
