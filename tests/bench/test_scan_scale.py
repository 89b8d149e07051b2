"""The watch over a scan: its own memory, and which records it named."""

import json
import os

from bench import scan_scale


def test_records_named_rightly_and_wrongly_are_counted(tmp_path):
    roles = ["element", "clean", "element", "clean"]
    lines = [json.dumps({"file_name": f"{i}.png", "role": role}) for i, role in enumerate(roles)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    named = {f"{tmp_path / 'metadata.jsonl'}:{line}" for line in (1, 2)}
    assert scan_scale.flagged(tmp_path, named) == {"elements": 2, "right": 1, "wrong": 1}


def test_memory_of_a_process_that_has_ended_is_none():
    assert scan_scale.anonymous(os.getpid()) > 10 and scan_scale.anonymous(2**22 + 1) == 0
