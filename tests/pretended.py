"""A GPU for tests where there is none: tensors of this machine that say they lie on CUDA.

Inside `Card` a tensor that was sent to CUDA computes as before, and says `cuda` where it is asked. An operation that
mixes it with the host's tensors raises, as it would on a GPU; whatever makes the host wait for it is counted by the
line of this project that asked.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from silentbad import ROOT

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
SAYS = {  # what a tensor there says of itself
    Tensor.device.__get__: CUDA,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}
READS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.numpy)
LOOKS = (Tensor.nonzero, torch.nonzero)  # the host must know how many
BETWEEN = (  # take tensors of both sides
    Tensor.copy_,
    torch._foreach_copy_,
    Tensor.__setitem__,
    Tensor.data.__set__,
    Tensor.grad.__set__,
    torch._has_compatible_shallow_copy_type,
)


class OnCard(Tensor):
    """A tensor that says it lies on CUDA."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Where no `Card` looks, as in a thread."""
        with torch._C.DisableTorchFunctionSubclass():
            return sent(function(*args, **(kwargs or {})))


def sent(tree: Any) -> Any:
    """Every tensor of a result, on the card."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(lambda x: x.as_subclass(OnCard) if type(x) is Tensor else x, tree)


def returned(tree: Any) -> Any:
    """Every tensor, on the host."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, OnCard) else x, tree)


def asked_by() -> str:
    """The line of this project that is being run: file and code."""
    named = [(frame.filename.removeprefix(f"{ROOT}/"), frame.line) for frame in traceback.extract_stack()]
    own = [(file, line) for file, line in named if not file.startswith(("/", ".venv", "tests"))]
    return f"{own[-1][0]}: {own[-1][1]}" if own else ""


class Card(TorchFunctionMode):
    """The card; `waits` counts what made the host wait for it, by line."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def wait(self) -> None:
        self.waits[asked_by()] += 1

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [isinstance(x, OnCard) for x in tensors]
        if any(there) and function in SAYS:
            return SAYS[function]
        if function in (Tensor.to, Tensor.cpu):
            return self._moved(function, args, kwargs)
        made_there = "device" in kwargs and torch.device(kwargs["device"] or CPU).type == "cuda"
        if made_there:
            kwargs["device"] = CPU
        if not any(there) and not made_there:
            return function(*args, **kwargs)
        if function in (*READS, *LOOKS):
            self.wait()
        if function == Tensor.__deepcopy__:
            return self._copied(*args)
        if not all(there) and function not in BETWEEN:
            if indexed := self._by_index(function, args, tensors, there):
                return indexed[0]
            apart = [tuple(x.shape) for x, on in zip(tensors, there, strict=True) if not on and x.ndim]
            if apart:
                raise RuntimeError(f"{function}: tensors of the host, {apart}, and of the card; {asked_by()}")
        if function == Tensor.__getitem__ and any(isinstance(i, list) for i in tree_leaves(args[1], lambda x: True)):
            self.wait()
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        on_host = function in READS or (function in BETWEEN and there and not there[0])
        return result if on_host else sent(result)

    def _moved(self, function, args, kwargs):
        """`to` and `cpu`."""
        was = isinstance(args[0], OnCard)
        places = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (str, torch.device, Tensor))]
        now = was
        if function is Tensor.cpu:
            now = False
        elif places:
            place = places[0]
            now = isinstance(place, OnCard) if isinstance(place, Tensor) else torch.device(place).type == "cuda"

        def as_host(value: Any) -> Any:
            return CPU if isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda" else value

        plain = returned(args[0])
        result = plain.to(*map(as_host, returned(args[1:])), **{key: as_host(value) for key, value in kwargs.items()})
        if was != now and not (kwargs.get("non_blocking") or any(x is True for x in args[1:])):
            self.wait()
        if was != now and result is plain:
            result = result.clone()
        return sent(result) if now else result

    def _copied(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            copied = sent(returned(tensor.detach()).clone())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        return memo[id(tensor)]

    def _by_index(self, function, args, tensors, there) -> list[Any]:
        """What an index of the other side gives: the host waits. Empty where it is none, or not allowed."""
        if function != Tensor.__getitem__:
            return []
        numbers = all(x.ndim == 0 for x, on in zip(tensors, there, strict=True) if on)
        if there[0] or numbers:
            self.wait()
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*returned(args))
            return [sent(result) if there[0] else result]
        return []


class Event:
    """torch.cuda.Event."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def pinned(tensor: Tensor) -> Tensor:
    """Tensor.pin_memory."""
    if isinstance(tensor, OnCard):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor


def install(monkeypatch: Any) -> None:
    """What of torch would look for a driver; the device of accelerators that are made from now on."""
    from accelerate.state import AcceleratorState, PartialState

    from silentbad.loop import trackers

    make = trackers.make_accelerator

    def on_card(config: Any) -> Any:
        accelerator = make(config)
        for state in (PartialState, AcceleratorState):
            state._shared_state["device"] = CUDA
        return accelerator

    monkeypatch.setattr(trackers, "make_accelerator", on_card)
    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a pretended card")
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
