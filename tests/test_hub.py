"""The Hub out of reach: seconds and one line; behind a proxy, or in the cache: as ever."""

import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from silentbad import hub
from silentbad.data.hub_data import hub_table
from silentbad.errors import UserError
from silentbad.measure.embedders import load_embedder
from silentbad.model.gate import Source
from silentbad.model.pipeline import read_index

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Sets the endpoint and leaves offline mode."""
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    for key in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    hub.unreachable.cache_clear()
    yield lambda endpoint: monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    hub.unreachable.cache_clear()
    close_session()


@pytest.fixture
def server():
    """One that knows no page; as a proxy it answers for every host."""

    class Unknown(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Unknown)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


def test_without_a_network_each_loader_says_so_at_once(online, tmp_path):
    online(NOWHERE)
    began = time.monotonic()
    of_data = SimpleNamespace(dataset_name="nobody/none", dataset_config_name=None, cache_dir=str(tmp_path))
    loads = (
        lambda: load_embedder("clip", None, "cpu"),
        lambda: hub_table(of_data),
        lambda: read_index(Source("nobody/none", cache_dir=str(tmp_path))),
    )
    for load in loads:
        with pytest.raises(UserError, match=f"{NOWHERE} cannot be reached: .*; connect, or give a local folder"):
            load()
    assert time.monotonic() - began < 10


def test_what_lies_in_the_cache_is_used_offline(online, pipelines, tmp_path):
    online(NOWHERE)
    folder, commit = tmp_path / "models--nobody--tiny", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    shutil.copytree(pipelines["epsilon"], folder / "snapshots" / commit)
    assert read_index(Source("nobody/tiny", cache_dir=str(tmp_path)))["_class_name"] == "StableDiffusionPipeline"


def test_any_answer_means_the_hub_is_there(online, server, monkeypatch):
    online(server)
    assert hub.unreachable() is None and not constants.HF_HUB_OFFLINE
    hub.unreachable.cache_clear()
    close_session()
    monkeypatch.setenv("HTTP_PROXY", server)
    online("http://hub.invalid")  # no such name: the proxy answers for it
    assert hub.unreachable() is None and not constants.HF_HUB_OFFLINE


def test_a_path_is_no_question_for_the_hub(online, tmp_path):
    online(NOWHERE)
    with pytest.raises(UserError, match="cannot load") as refused:
        load_embedder("clip", str(tmp_path / "none"), "cpu")
    assert "cannot be reached" not in str(refused.value)
