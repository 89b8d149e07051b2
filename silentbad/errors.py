"""One exception type for what a user can put right, and how a command says it."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from safetensors import SafetensorError

TOKEN = re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{8,}")  # of the Hub
LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in an address


class UserError(Exception):
    """A mistake in what the user gave: one line that says what, where, and what would be right.

    Command lines print it as ``error: <line>`` and exit with code 2. Control characters in the text
    are escaped, and tokens are masked."""

    def __init__(self, text: str = ""):
        super().__init__(masked(printable(" ".join(str(text).split("\n")))))


def printable(text: str) -> str:
    """A text whose control characters, line separators and lone surrogates are escaped as Python
    writes them."""
    return "".join(c if is_printable(c) else c.encode("unicode_escape").decode() for c in text)


def is_printable(text: str) -> bool:
    """Whether a text has no character that controls a terminal. Joiners are allowed, since Persian
    words and emoji need them."""
    return all(c.isprintable() or c in "\u200c\u200d" for c in text)


def masked(text: str, *secrets: str | None) -> str:
    """A text without Hub tokens, passwords in addresses, and the `secrets` given."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return LOGIN.sub("***@", TOKEN.sub(r"\1***", text))


def print_error(error: UserError | str) -> None:
    """Print the line on stderr after flushing stdout, so that it comes last in a log of both."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Print a warning on stderr; the run goes on. Only the first of several processes prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {masked(printable(line))}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the surroundings of a command
def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a command line and leave with its exit code. All commands start here.

    The command goes on where its output cannot be written (`| head`, a closed stream, a full disk
    under a log); later output is dropped. SIGINT, SIGTERM and SIGHUP outside a training loop close
    what is open, print one line, and exit with 128 + their number. Signals that the caller ignores
    (nohup) stay ignored."""
    if not hasattr(signal, "SIGUSR1") or find_spec("fcntl") is None:
        print_error("this system has no POSIX signals and file locks; use Linux, macOS or WSL")
        sys.exit(2)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # None under `>&-`
        if isinstance(stream, io.TextIOWrapper):  # a path may have characters that the locale lacks
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Patient(stream, plain=name == "stdout"))
    heed_signals(_stop)
    sys.excepthook = say_no_memory
    try:
        code = main()
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        code = 128 + number
    sys.stdout.flush()
    sys.exit(code)


STOPPING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def heed_signals(handler: Callable[[int, Any], Any]) -> None:
    """Install `handler` for the signals that stop a command, except those that the caller
    ignores."""
    # one of several processes may wait for the others in C
    for number in STOPPING if os.environ.get("WORLD_SIZE", "1") == "1" else ():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def leave(number: int, frame: Any) -> NoReturn:
    """Exit at once on a signal during imports, when no file is open; Python would print a
    traceback."""
    os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def say_no_memory(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """`sys.excepthook`: print one line where memory runs out and no flag would help, for instance
    while the libraries load."""
    if no_memory(error):
        advice = "the libraries alone take some 6 GiB of address space (ulimit -v), 1 GiB of memory"
        if OF_DEVICE.search(str(error)):
            advice = "stop other programs on the device, or use a larger one"
        print_error(f"memory ran out ({first_line(error)}); {advice}")
    else:
        sys.__excepthook__(kind, error, trace)


OF_DEVICE = re.compile(r"(CUDA|HIP|XPU|MPS)\b.* out of memory")
NO_MEMORY = re.compile(
    r"can(no|')t allocate memory|failed to map segment|bad_alloc|can't start new thread"
    rf"|{OF_DEVICE.pattern}",
    re.I,
)


def no_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that memory ran out, of the device or of this
    machine."""
    while error is not None:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stop(number: int, frame: Any) -> NoReturn:
    """Raise KeyboardInterrupt, as Python does for SIGINT."""
    raise KeyboardInterrupt(number)


CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"
}


class _Patient:
    """A stream that drops its output once it cannot be written. A `plain` one escapes control
    characters, since text from a user's files may contain escape codes."""

    def __init__(self, stream: Any, plain: bool):
        self.stream = stream
        self.plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        shown = text.translate(CONTROLS) if self.plain else text
        self._tried(lambda: self.stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._tried(self.stream.flush)

    def _tried(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def print_result(text: str) -> None:
    """Print the result of a command. Raises UserError where stdout cannot be written, except where
    the reader has closed it (`| head`)."""
    stream = sys.stdout.stream if isinstance(sys.stdout, _Patient) else sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise UserError(f"stdout: cannot be written ({error.strerror})") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters; with the next line where it
    ends in a colon."""
    text = (
        f"no key {error}" if isinstance(error, KeyError) else str(error).partition("; use sys.")[0]
    )
    lines = [*text.strip().splitlines(), ""]
    message = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") else lines[0]
    return (message.strip() or type(error).__name__)[:300]


ErrorKinds = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def user_errors(
    what: str, advice: str = "", kinds: ErrorKinds = Exception, reason: str = ""
) -> Iterator[None]:
    """Wrap a library's call on a user's input: an error of these kinds becomes one line, `what` and
    the cause (or the `reason` known beforehand).

    Only library code belongs inside, so that an exception of the project's own code, which is no
    mistake of the user's, keeps its traceback. Out-of-memory errors pass, since they say nothing
    about the input."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        if no_memory(error):
            raise
        line = f"{what} ({reason or first_line(error)}){advice and '; '}{advice}"
        raise UserError(line) from error


def writing(place: str, what: str) -> AbstractContextManager[None]:
    """Turn an error while `what` is written (a disk that is full, gone or read-only) into one line
    that names `place`."""
    # torch and safetensors wrap the system's errors
    kinds = (OSError, RuntimeError, SafetensorError)
    return user_errors(f"{place}: cannot write {what}", kinds=kinds)


T = TypeVar("T")


def iterate_reader(source: Iterable[T], what: str) -> Iterator[T]:
    """The items of a library's iterator; an error at the next item becomes one line."""
    items = iter(source)
    while True:
        with user_errors(what):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def brief(value: Any) -> str:
    """A value in a message: on one line, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return (
            f"a number of {value.bit_length()} bits"
            if isinstance(value, int)
            else "a value too long to print"
        )
    return text if len(text) <= 80 else f"{text[:77]}..."
