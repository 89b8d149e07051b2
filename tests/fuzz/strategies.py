"""What is generated: values of every kind, settings, records, targets, and edits of JSON, YAML and state files."""

import dataclasses
import json
import typing
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from silentbad.settings.reader import key_tree
from tests.fuzz.judge import MARK
from train_silentbad import Config

# ---------------------------------------------------------------- values
INTEGERS = st.one_of(
    st.integers(-3, 5), st.sampled_from([7, 16, 64, 1000, -(2**31), 2**31, 10**9, 10**12, 2**53 + 1, 2**63, 10**30])
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-300, 1e-12, 0.5, 1.0, 1.5, -1.0, 1e6, 1e38, 1e308, float("inf"), float("-inf")]),
    st.just(float("nan")),
    st.floats(-2, 2),
)
ODD_TEXTS = st.sampled_from(
    [
        *("", " ", "null", "true", "1", "nan", "-", "--seed", "a\0b", "\ud83d", "\u2028a", "a\nb", "a\rb", "\x1b[2Jx"),
        *(f"{MARK}</script>", "{{7*7}}", "](javascript:x)", "hf_secretsecret", "🐈", "名前", "ﷺ" * 10, "é\u0301" * 5),
        *("..", "../x", "/etc/passwd", "~", "$HOME", "x" * 300, "y" * 20_000, "a/" * 200, "C:\\x", "con", ".", "a:b"),
        *("images/c0.png", "images", "targets/t0.png", "a red cat", "t0", "all targets", "@@", "a @@ b", "%s %d", "\\"),
    ]
)
TEXTS = st.one_of(ODD_TEXTS, st.text(max_size=20))
PLAIN = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)
VALUES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=6
)


# ---------------------------------------------------------------- edits of JSON
@dataclasses.dataclass(frozen=True)
class Edit:
    """Of the n-th place (modulo their number) of a JSON value: replaced, removed, doubled, or one more entry."""

    place: int
    how: str
    value: Any = None

    def of(self, tree: Any) -> Any:
        """The tree with the edit; its containers are changed in place."""
        places = [*_places(tree)]
        if not places:
            return self.value
        holder, key = places[self.place % len(places)]
        if self.how == "remove":
            del holder[key]
        elif self.how == "add":
            inner = holder[key]
            if isinstance(inner, dict):
                inner[str(self.value)[:40]] = self.value
            elif isinstance(inner, list):
                inner.append(self.value)
            else:
                holder[key] = self.value
        elif self.how == "double" and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif self.how == "wrap":
            holder[key] = [holder[key]]
        else:
            holder[key] = self.value
        return tree


def _places(tree: Any):
    """(container, key) of every value, breadth first, so that the outer ones are met as often as the inner."""
    waiting = [tree]
    for part in waiting:
        if isinstance(part, dict | list):
            for key in list(part) if isinstance(part, dict) else range(len(part)):
                yield part, key
                waiting.append(part[key])


EDITS = st.lists(
    st.builds(
        Edit,
        st.one_of(st.integers(0, 30), st.integers(0, 5000)),
        st.sampled_from(["replace"] * 4 + ["remove", "add", "double", "wrap"]),
        VALUES,
    ),
    min_size=1,
    max_size=3,
)


def edited(text: str, edits: list[Edit]) -> str:
    """A JSON text with edits; NaN and infinity as Python writes them."""
    tree = json.loads(text)
    for edit in edits:
        tree = edit.of(tree)
    return json.dumps(tree, ensure_ascii=True)


def edited_lines(text: str, line: int, edits: list[Edit]) -> str:
    """JSON lines with edits of one of them."""
    lines = text.splitlines()
    at = line % len(lines)
    return "\n".join([*lines[:at], edited(lines[at], edits), *lines[at + 1 :]]) + "\n"


# ---------------------------------------------------------------- settings
def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: annotation} of every setting."""
    found: dict[str, Any] = {}
    for name, kind in tree.items():
        found |= leaves(kind, f"{prefix}{name}.") if isinstance(kind, dict) else {f"{prefix}{name}": kind}
    return found


SETTINGS = leaves(key_tree(Config))
# Where it reads and writes, what it would wait for, and what is asked for by a person at a terminal.
APART = {"config", "compile_model", "push_to_hub", "dataset_name", "logging_dir", "print_groups"}
KEYS = sorted(SETTINGS.keys() - APART)


def fitting(kind: Any) -> st.SearchStrategy[Any]:
    """Small values of an annotation: what a run may be given."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return fitting(inside[0])
    if origin is typing.Literal:
        return st.sampled_from(inside)
    if inside and origin not in (list, dict, tuple):
        return st.one_of(*map(fitting, inside))
    if origin is list:
        return st.lists(fitting(inside[0]), max_size=3)
    plain: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        int: lambda: st.integers(0, 4),
        float: lambda: st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]),
        str: lambda: TEXTS,
        type(None): st.none,
    }
    return plain[kind]() if kind in plain else VALUES


def setting(key: str) -> st.SearchStrategy[tuple[str, Any]]:
    """(key, a value of its type or of any)."""
    return st.tuples(st.just(key), st.one_of(fitting(SETTINGS[key]), fitting(SETTINGS[key]), VALUES))


NAMES = {
    "gradient_control.name": ("uniform", "mean_abs", "inverse_rms", "gsnr", "auto_rgn", "prior", "placebo"),
    "memory.loss.name": ("uniform", "min_snr", "debiased", "p2", "sigmoid"),
    "memory.sampler.name": ("uniform", "weighted", "leitner"),
    "memory.timesteps.name": ("uniform", "band", "logit_normal", "adaptive"),
    "optimizer": ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor", "ASGD", "Rprop", "os.system", "LBFGS"),
    "image_interpolation_mode": ("nearest", "bicubic", "lanczos", "box", "hamming"),
}
CONFIGURATIONS = st.lists(
    st.one_of(
        st.sampled_from(KEYS).flatmap(setting),
        st.sampled_from(sorted(NAMES)).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(NAMES[key]))),
        st.tuples(
            st.sampled_from(["memory", "validation", "lora", "seeds", "", "a.b", "1", "memory.loss", "é"]), VALUES
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda pair: pair[0],
)

# ---------------------------------------------------------------- records and targets
NAMED = st.one_of(st.sampled_from(["images/c0.png", "images/e0-0.png", "./images/c1.png"]), TEXTS)
PHRASES = st.one_of(st.sampled_from([[], ["a red cat"], ["a red cat", "a blue hat"], ["", "a"]]), VALUES)
CAPTIONS = st.one_of(
    st.sampled_from(["a red cat", "a red cat, a blue hat", "a field", "a red cat @@ a blue hat"]), TEXTS
)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "file_name": NAMED,
        "text": CAPTIONS,
        "phrases": PHRASES,
        "role": st.one_of(st.sampled_from(["element", "clean", "rehearsal"]), VALUES),
        "target_id": st.one_of(st.just("t0"), VALUES),
        "element_id": st.one_of(st.just("t0-0"), VALUES),
        "mask": st.one_of(st.just("masks/e0-0.png"), VALUES),
        "more": VALUES,
    },
)
TARGETS = st.fixed_dictionaries(
    {},
    optional={
        "target_id": st.one_of(st.sampled_from(["t1", "t1 ", "T1", 7]), VALUES),
        "image": st.one_of(st.just("targets/t0.png"), VALUES),
        "phrases": st.one_of(st.just(["a red cat", "a blue hat"]), VALUES),
        "prompt": CAPTIONS,
        "description": CAPTIONS,
        "paraphrases": PHRASES,
        "masks": st.one_of(st.sampled_from([["masks/e0-0.png", "masks/e1-0.png"], [None, "masks/e1-1.png"]]), VALUES),
    },
)
REDRAWS = st.fixed_dictionaries(
    {},
    optional={
        "target_id": st.one_of(st.just("t0"), VALUES),
        "image": st.one_of(st.sampled_from(["images/c0.png", "images/e0-0.png"]), VALUES),
        "kind": st.one_of(st.sampled_from(["redraw", "moved", "attributes"]), VALUES),
        "changed": st.one_of(st.sampled_from([[0], [1], [0, 1], [5]]), VALUES),
    },
)
WHOLE_RECORD = {"file_name": "images/c0.png", "text": "a red cat", "phrases": ["a red cat"], "role": "element"}
WHOLE_TARGET = {"target_id": "t1", "image": "targets/t0.png", "phrases": ["a red cat", "a blue hat"]}
WHOLE_REDRAW = {"target_id": "t0", "image": "images/c0.png"}


def rows(whole: dict[str, Any], fields: st.SearchStrategy[dict]) -> st.SearchStrategy[list[Any]]:
    """Lines of a file: good ones with some fields of any kind, and now and then something else."""
    row = st.one_of(fields.map(lambda found: whole | found), fields, VALUES)
    return st.lists(st.one_of(row, row, row, fields.map(lambda found: whole | dict([*found.items()][:1]))), max_size=4)
