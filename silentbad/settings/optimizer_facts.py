"""Facts about an optimizer, read from its source: its options, whether it averages weights."""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from silentbad.errors import UserError, brief, warn
from silentbad.settings import user_code
from silentbad.settings.registries import definition_at, definition_of
from silentbad.settings.types import Option, problem

if TYPE_CHECKING:
    from silentbad.settings.train import TrainConfig

ELEMENTWISE = ("AdamW", "Adam", "SGD")  # they update each weight by itself: a shard is enough
ADAPTIVE = ("Prodigy", "DAdapt")  # names of those that find their own rate
KNOWN = {  # packages that hold optimizers: what `pip install` calls them
    "bitsandbytes": "bitsandbytes",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch-optimizer",
}


@dataclass(frozen=True)
class OptimizerFacts:
    """The facts about its optimizer that the checks of a run use."""

    name: str
    options: Mapping[str, Option]  # of its constructor
    # it has `eval` and `train`, so other weights are measured than trained
    averages: bool
    needs: str  # a requirement that this loop does not meet, or empty


def path_of(config: "TrainConfig") -> tuple[str, str]:
    """(the key that chooses the optimizer, its import path or place)."""
    if config.gradient_control.spectral:
        return "gradient_control.spectral", "silentbad.control.spectral.SpectralAdamW"
    if config.use_8bit_adam:
        return "use_8bit_adam", "bitsandbytes.optim.AdamW8bit"
    path = config.optimizer
    return "optimizer", path if "." in path else f"torch.optim.{path}"  # PATH.py:NAME has one


def read_optimizer(config: "TrainConfig") -> OptimizerFacts | None:
    """The optimizer of a run, from its source; None where only an import can tell."""
    key, path = path_of(config)
    if user_code.is_place(path):
        definition = definition_at(key, path)
    else:
        package = path.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{key}: no module named {package}; {source_of(path)}")
        definition = definition_of(path)
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        if path.startswith("torch.optim."):
            raise UserError(not_one(key, config.optimizer))
        return None
    step = definition.method("step")
    needed = step.args.args[: len(step.args.args) - len(step.args.defaults)] if step else []
    needs = "sparse gradients" if definition.node.name == "SparseAdam" else ""
    if any(argument.arg == "closure" for argument in needed):
        needs = "to compute the loss itself"
    return OptimizerFacts(
        name=definition.node.name,
        options=definition.parameters(),
        averages=definition.method("eval") is not None and definition.method("train") is not None,
        needs=needs,
    )


def source_of(path: str) -> str:
    """Where the class of an import path comes from, as far as it is known."""
    package, _, name = path.partition(".")
    if package in KNOWN:
        return f"pip install {KNOWN[package]}"
    return f"a class in a file of your own is {package}.py:{name.rpartition('.')[2]}"


def not_one(key: str, path: str) -> str:
    """The line on a name that is no optimizer."""
    return f"{key}: {path} is no torch optimizer; AdamW or schedulefree.AdamWScheduleFree are"


def check_optimizer(config: "TrainConfig", optimizer: OptimizerFacts) -> None:
    """Refuse an optimizer that this loop cannot use, and options that it does not take."""
    if optimizer.needs:
        raise UserError(f"optimizer: {optimizer.name} needs {optimizer.needs}; AdamW or SGD do not")
    if optimizer.name.startswith(ADAPTIVE) and config.learning_rate < 0.1:
        warn(
            f"learning_rate: {config.learning_rate:g} is a factor of the rate"
            f" that {optimizer.name} finds itself; it wants 1"
        )
    if optimizer.name.startswith("Adam") and config.learning_rate >= 0.1:
        warn(
            f"learning_rate: {config.learning_rate:g} is a thousand times {optimizer.name}'s usual"
        )
    if "lr" in config.optimizer_options:
        raise UserError("optimizer_options: lr is set by learning_rate")
    for key, value in config.optimizer_options.items():
        if key not in optimizer.options or key == "params":
            names = ", ".join(name for name in optimizer.options if name not in ("params", "lr"))
            raise UserError(
                f"optimizer_options: {optimizer.name} takes no {key!r}; it takes: {names}"
            )
        wrong = problem(value, optimizer.options[key].hint)
        if wrong is not None:
            raise UserError(f"optimizer_options: {key} {wrong}, got {brief(value)}")
