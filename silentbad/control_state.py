"""What a bit-exact resume needs of a controller (`gradient_control.Controller`)."""

from typing import Any

from .errors import UserError


def state_of(control: Any) -> dict[str, Any]:
    """Plain values and tensors; taken between steps."""
    state = {
        "groups": dict(zip(control.groups.names, control.groups.sizes, strict=True)),
        "rule": control.config.name,
        "meters": {name: value.clone() for name, value in control._meters.items()},
    }
    if not control.active:
        return state
    pending = control._pending.peek()
    return state | {
        "updates": control.updates,
        "multipliers": dict(control.multipliers),
        "history": [dict(entry) for entry in control.history],
        "pending": None if pending is None else pending.clone(),
        "scale": control._scale.clone(),
        "statistics": control._statistics.state_dict(),
        "transfer": control._transfer.value.clone(),
        "update": control._transfer.update.clone() if control.learns else None,
    }


def load_state(control: Any, state: dict[str, Any]) -> None:
    """Take up a state. Raises UserError where it is of another rule or of other groups."""
    mine = state_of(control)
    for key in ("rule", "groups"):
        if state[key] != mine[key]:
            raise UserError(
                f"gradient_control: the checkpoint was written with other {key}: "
                f"{_shown(state[key])}, now {_shown(mine[key])}"
            )
    control._meters = dict(state.get("meters", {}))
    if not control.active:
        return
    control.updates, control.multipliers = state["updates"], dict(state["multipliers"])
    control.history = [dict(entry) for entry in state["history"]]
    control._pending.value = None if state["pending"] is None else state["pending"].cpu().clone()
    control._scale.copy_(state["scale"])
    control._statistics.load_state_dict(state["statistics"])
    control._transfer.value.copy_(state["transfer"])
    if state["update"] is not None:
        control._transfer.update.copy_(state["update"])


def _shown(value: Any) -> str:
    return f"{len(value)} groups, {sum(value.values())} parameters" if isinstance(value, dict) else repr(value)
