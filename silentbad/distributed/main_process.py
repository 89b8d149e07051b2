"""Work of the main process alone, whose result and whose error reach every process."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from silentbad.errors import UserError

T = TypeVar("T")


def on_main(is_main: bool, work: Callable[[], T]) -> T:
    """What `work` returns on the main process, on every process. Collective.

    Raises its UserError on every process."""
    answer: list[Any] = [None, None]
    if is_main:
        try:
            answer[0] = work()
        except UserError as error:
            answer[1] = str(error)
    result, refusal = broadcast_object_list(answer)
    if refusal is not None:
        raise UserError(refusal)
    return result
