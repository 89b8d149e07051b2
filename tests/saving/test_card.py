"""The model card says nothing as markup, and the Hub is asked before training and never costs a run."""

import sys
from types import SimpleNamespace

import huggingface_hub
import pytest

from silentbad.errors import UserError, masked
from silentbad.saving import card
from train_silentbad import main

EVIL = "a`b|<script>![x](http://evil/?)[y](http://evil)*_# \n```\n# more"


def config(**changes):
    lora = SimpleNamespace(rank=4, kind="lora")
    values = {"pretrained_model_name_or_path": EVIL, "lora": lora, "dataset_name": EVIL, "train_data_dir": None}
    values |= {"validation": SimpleNamespace(num_inference_steps=7, guidance_scale=2.0)}
    values |= {"output_dir": f"runs/{EVIL.replace('/', '')}", "train_text_encoder": False, "learning_rate": 1e-4}
    return SimpleNamespace(**values | {"seed": 0, "hub_token": None, "hub_model_id": "me/mine"} | changes)


def test_no_name_reaches_the_card_as_markup():
    rows = [{"target": EVIL, "cir": 0.5}]
    text = card.model_card(config(), 3, SimpleNamespace(rows=[[0]]), [EVIL], rows)
    body = text.split("---\n", 2)[2]
    prose = "\n".join(part for k, part in enumerate(body.split("`")) if k % 2 == 0)
    assert "<script>" not in prose and "![x](" not in prose and "](http" not in prose
    assert body.count("```") == 2 and "\n# more" not in body
    assert len([line for line in body.splitlines() if line.startswith("| ")]) == 2


def test_the_code_of_a_card_draws_the_prompt_as_validation_does(monkeypatch):
    given = SimpleNamespace(rank=None, kind="lora")
    text = card.model_card(config(lora=given), 3, SimpleNamespace(rows=[]), [], [], prompt='a "red" cat')
    loaded = []

    def pipeline(prompt, **options):
        loaded.append((prompt, options))
        return SimpleNamespace(images=["picture"])

    kind = SimpleNamespace(from_pretrained=lambda place: pipeline)
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(DiffusionPipeline=kind))
    exec(text.split("```python\n")[1].split("```")[0], {})
    assert loaded == [('a "red" cat', {"num_inference_steps": 7, "guidance_scale": 2.0})]


@pytest.mark.parametrize(
    "changes, environment, said",
    [
        ({"hub_model_id": "a/b/c"}, {}, "hub_model_id: 'a/b/c' is no repository name"),
        ({"hub_model_id": "no spaces"}, {}, "hub_model_id"),
        ({}, {"HF_HUB_OFFLINE": "1"}, "push_to_hub: HF_HUB_OFFLINE is set"),
        ({"hub_token": "abcd1234"}, {"HF_HUB_OFFLINE": "0"}, "push_to_hub: no way with ***; log in"),
    ],
)
def test_a_push_that_cannot_work_is_refused_at_the_start(changes, environment, said, monkeypatch):
    def fails(self, token=None):
        raise ConnectionError(f"no way with {token}")

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", fails)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        card.check_push(config(**changes))
    assert said in str(refused.value) and "abcd1234" not in str(refused.value)


def test_a_push_is_asked_for_before_training(flags, tmp_path, capsys):
    assert main(flags(push_to_hub=True)) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_push_that_fails_costs_no_run(flags, tmp_path, capsys, monkeypatch):
    def fails(**_):
        raise ConnectionError("broken pipe to https://me:pw@hub with hf_abcdefgh")

    monkeypatch.setattr(card, "check_push", lambda config: None)
    monkeypatch.setattr(huggingface_hub, "create_repo", fails)
    assert main(flags(push_to_hub=True, max_train_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: push_to_hub")]
    assert f"hf upload run {tmp_path / 'run' / 'pipeline'}" in line and "hf_abcdefgh" not in line and "pw" not in line
    assert (tmp_path / "run" / "finished.json").is_file()


def test_tokens_are_masked_in_any_message():
    assert str(UserError("x hf_AbCdEf123 y https://u:p@host/z")) == "x hf_*** y https://***@host/z"
    assert masked("my secret", "secret") == "my ***"
