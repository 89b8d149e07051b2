"""Whether the Hugging Face Hub answers: asked once, since its client and the loaders above try for
a minute or two.

The question goes through huggingface_hub's own session, so that proxies, HF_ENDPOINT and
certificates are the user's."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import datasets
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from silentbad.errors import first_line, user_errors
from silentbad.files import names_folder

# of httpx and of requests
SILENT = {"NetworkError", "TimeoutException", "ConnectionError", "Timeout"}
TRIES = 2


@cache
def unreachable() -> str | None:
    """Why the Hub does not answer; None where it answers at all, or HF_HUB_OFFLINE is set.

    If it does not answer, HF_HUB_OFFLINE is set for this process, so that loaders use only the
    cache. Each try takes at most half of HF_HUB_ETAG_TIMEOUT, which is 10 s by default."""
    if constants.HF_HUB_OFFLINE:
        return None
    reason = ""
    for number in range(TRIES):
        time.sleep(number)
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT / TRIES)
            return None
        except Exception as error:
            if not SILENT & {kind.__name__ for kind in type(error).__mro__}:
                # a proxy that refuses, an endpoint that is no address: the loader's own message is
                # clearer
                return None
            reason = first_line(error)
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} cannot be reached: {reason}"


@contextmanager
def fetching(path: str, failed: str) -> Iterator[None]:
    """Wrap a loader of a folder or a Hub id: its errors become one line that begins with `failed`.
    If the Hub does not answer, the line says so, and what to do."""
    here = os.path.exists(path) or names_folder(path)
    away = None if here else unreachable()
    if away is None and not here and constants.HF_HUB_OFFLINE:
        away = "HF_HUB_OFFLINE is set"
    absent = f"{away}; the cache has no complete copy; connect, or give a local folder"
    with user_errors(failed, reason=absent if away else ""):
        yield
