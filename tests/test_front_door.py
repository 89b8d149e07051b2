"""A mistake as a person meets it, in real processes: its line is the last thing said, the exit code as stated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from silentbad.distributed.start import start

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


def test_a_reader_that_leaves_costs_no_traceback():
    """As in `train_silentbad.py ... | head -1`."""
    command = "import sys; from silentbad.errors import exit_with; exit_with(lambda: print('x' * 99999) or 3)"
    with subprocess.Popen((sys.executable, "-c", command), cwd=ROOT, stdout=-1, stderr=-1) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1


@pytest.mark.parametrize(
    "surroundings, said",
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION: must be no, fp16 or bf16, is 'fp8'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "ACCELERATE_MIXED_PRECISION: fp16 needs a CUDA device"),
        ({"ACCELERATE_DYNAMO_BACKEND": "bogus"}, "accelerate cannot start ('BOGUS' is not a valid DynamoBackend)"),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, "accelerate cannot start"),
    ],
)
def test_surroundings_that_accelerate_refuses_are_one_line(surroundings, said):
    command = "from silentbad.distributed.start import start; start()"
    if torch.cuda.is_available() and "fp16" in said:
        pytest.skip("a CUDA device has fp16")
    done = subprocess.run(
        (sys.executable, "-c", command), cwd=ROOT, env={**os.environ, **surroundings}, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith(f"silentbad.errors.UserError: {said}")


def test_only_the_flag_says_how_gradients_add_up(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start(2).gradient_accumulation_steps == 2
    assert "STEPS 4 does not count; gradient_accumulation_steps is 2" in capsys.readouterr().err
