"""A mistake as a person meets it, in real processes: its line is the last thing said, the exit code as stated."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from silentbad.distributed import start as starting
from silentbad.distributed.start import start
from silentbad.errors import UserError
from silentbad.files import scratch_folder
from silentbad.report import run_report
from silentbad_shield.scan import scanner as scan
from tests.training import checked
from train_silentbad import main

ROOT = Path(__file__).parents[1]
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
ONE = (*LAUNCH, "--config_file", "configs/accelerate/cpu.yaml")
TWO = (*LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
LINE = "error: learning_rate (command line): must be float, got 'fast'"


def run(start: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess:
    """Start a training with a mistake in it."""
    command = [*start, "train_silentbad.py", "--train_data_dir", "x", "--learning_rate", "fast"]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240)


def test_python_ends_with_the_line_and_code_2():
    done = run((sys.executable,))
    assert (done.returncode, done.stderr.splitlines(), done.stdout) == (2, [LINE], "")


def test_accelerate_launch_says_the_line_and_ends_with_code_1():
    done = run(ONE)
    assert done.returncode == 1 and done.stderr.splitlines().count(LINE) == 1


@pytest.mark.thorough
def test_accelerate_launch_quiet_says_the_line_and_no_traceback():
    done = run((*ONE, "--quiet"))
    assert done.returncode == 1 and set(done.stderr.splitlines()) == {LINE}


@pytest.mark.thorough
def test_two_processes_say_the_line_and_end_with_code_1():
    done = run(TWO, ACCELERATE_USE_CPU="true")
    assert done.returncode == 1 and done.stderr.splitlines().count(LINE) == 1


COMMAND = """
import sys, tempfile, time
from silentbad.errors import exit_with
def main():
    for k in range(20_000):
        print("a line", k)
    print("\x1b[31mred", "می\u200cخواهم", flush=True)
    if "wait" in sys.argv:
        with tempfile.TemporaryDirectory(dir="."):
            print("waiting", file=sys.stderr, flush=True)
            time.sleep(60)
    open("done", "w").close()
    return 3
exit_with(main)
"""


def heed() -> None:
    """Before a command: tests may run where signals are ignored, as under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(redirected: str, folder: Path, *words: str) -> subprocess.Popen:
    """COMMAND with its streams as a shell redirects them."""
    (folder / "program.py").write_text(COMMAND, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    line = f'cd "$0" && exec "$@" {redirected}'
    called = ("bash", "-c", line, folder, sys.executable, "program.py", *words)
    heeds = {"preexec_fn": heed}
    return subprocess.Popen(called, env=environment, stderr=subprocess.PIPE, text=True, **heeds)


@pytest.mark.parametrize("redirected", ["> >(head -1)", ">&-", "> /dev/full", "2>&- >/dev/null", "> out"])
def test_streams_that_cannot_be_written_cost_no_work(redirected, tmp_path):
    process = started(redirected, tmp_path)
    error = process.communicate()[1]
    assert (process.returncode, error) == (3, "") and (tmp_path / "done").exists()
    if redirected == "> out":  # nothing acts on a terminal; joiners are of words
        assert (tmp_path / "out").read_text(encoding="utf-8").splitlines()[-1] == "\\x1b[31mred می\u200cخواهم"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_outside_the_loop_is_one_line(number, code, tmp_path):
    process = started("> out", tmp_path, "wait")
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(number)
    assert process.communicate()[1] == f"stopped by {number.name}\n" and process.returncode == code
    assert {file.name for file in tmp_path.iterdir()} == {"program.py", "out"}  # no scratch folder


def test_a_signal_during_the_imports_is_one_line(tmp_path):
    program = "import sys, time; from silentbad.settings.startup import early; early(dict); "
    program += "print('importing', file=sys.stderr, flush=True); time.sleep(60)"
    heeds = {"preexec_fn": heed}
    called = [sys.executable, "-c", program]
    with subprocess.Popen(called, cwd=ROOT, stderr=subprocess.PIPE, text=True, **heeds) as process:
        assert [process.stderr.readline() for _ in range(2)] == ["loading\n", "importing\n"]
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "stopped by SIGINT\n" and process.returncode == 130


def test_memory_that_runs_out_during_the_imports_is_one_line():
    little = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))}
    command = [sys.executable, "train_silentbad.py", "--train_data_dir", "docs/example", "--output_dir", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **little)
    loading, line = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: memory ran out (") and "ulimit -v" in line


def test_a_result_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "silentbad.prepare", "--print_config"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "error: stdout: cannot be written (No space left on device)\n"


def test_a_name_beyond_the_locale_is_printed_with_backslashes(tmp_path):
    program = "from silentbad.errors import exit_with; exit_with(lambda: print('caf\xe9 \u732b'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\\xe9 \\u732b\n", b"")


def test_a_signal_while_a_scratch_folder_is_made_leaves_none(tmp_path, monkeypatch):
    make = Path.mkdir

    def make_and_stop(self, *words, **named):
        make(self, *words, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", make_and_stop)
    with pytest.raises(KeyboardInterrupt), scratch_folder():
        pass
    assert [*tmp_path.iterdir()] == []


def test_a_scratch_folder_is_there_until_the_block_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert [*tmp_path.iterdir()] == [Path(folder)]
    assert [*tmp_path.iterdir()] == []


def test_a_wait_for_processes_that_are_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(starting, "PATIENCE", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with starting.report_waiting():
        time.sleep(0.3)
    assert "waiting for 2 processes at 127.0.0.1:29500; for one, unset RANK" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    with starting.report_waiting():
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


LONG = "n" * 300
LONG_NAMES = [
    (scan.main, ["--train_data_dir", LONG]),
    (run_report.main, [LONG]),
    (run_report.main, ["compare", LONG, LONG]),
]


@pytest.mark.parametrize("main, arguments", LONG_NAMES)
def test_a_name_that_no_file_can_have_is_one_line(main, arguments, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "(command line): " in line and "names have at most 255 bytes" in line


def test_the_default_base_is_found_from_any_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = Path(checked(["--train_data_dir", str(data)]).pretrained_model_name_or_path)
    assert base.is_absolute() and (base / "model_index.json").is_file()


@pytest.mark.parametrize(
    "surroundings, said",
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION: must be no, fp16 or bf16, is 'fp8'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "ACCELERATE_MIXED_PRECISION: fp16 needs a CUDA device"),
        ({"ACCELERATE_DYNAMO_BACKEND": "bogus"}, "accelerate cannot start ('BOGUS' is not a valid DynamoBackend)"),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, "accelerate cannot start"),
    ],
)
def test_surroundings_that_accelerate_refuses_are_one_line(surroundings, said, monkeypatch):
    if torch.cuda.is_available() and "fp16" in said:
        pytest.skip("a CUDA device has fp16")
    for key, value in surroundings.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError) as refused:
        start()
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_more_processes_than_cards_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="^2 processes need as many cards, here there are 1; start --num_processes 1"):
        start()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    starting.check_cards()


@pytest.mark.parametrize("tf32", [True, False])
def test_convolutions_follow_the_flag_of_tf32_as_products_do(tf32):
    start(tf32=tf32)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (tf32, tf32)


def test_only_the_flag_says_how_gradients_add_up(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start(2).gradient_accumulation_steps == 2
    assert "STEPS 4 does not count; gradient_accumulation_steps is 2" in capsys.readouterr().err


def test_groups_onto_a_full_disk_are_one_line(flags, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(flags(print_groups="true")) == 2
    assert "error: stdout: cannot be written (No space left on device)" in capsys.readouterr().err


def test_what_bitsandbytes_warns_of_itself_stays_off_the_screen():
    """Its loggers warn at import of kernels that no run here asks for."""
    warns = "import logging; logging.getLogger('bitsandbytes.backends').warning('Failed to load CPU gemm_4bit_forward')"
    said = [
        subprocess.run([sys.executable, "-c", first + warns], cwd=ROOT, capture_output=True, text=True).stderr
        for first in ("", "import silentbad; ")
    ]
    assert "gemm_4bit" in said[0] and said[1] == ""


def test_a_training_says_at_once_that_it_loads(flags, tmp_path):
    """Before the seconds of the imports; a mistake in a flag is said alone."""
    process = subprocess.Popen(
        [sys.executable, "train_silentbad.py", *flags(max_train_steps=1)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr.readline() == "loading\n"
    process.kill()
    process.wait()
