"""Which group a parameter belongs to, for every kind of model."""

import pytest
import torch

from gradient_control import (
    group_parameters,
)
from silentbad.model.groups import OTHER, group_of
from tests.published import PUBLISHED, published
from tests.toy import NAMES, Toy, config, controlled, run


def lora(unet):
    from peft import LoraConfig, inject_adapter_in_model

    unet.requires_grad_(False)
    targets = [
        "to_k",
        "to_q",
        "to_v",
        "to_out.0",
        "proj_in",
        "proj_out",
        "ff.net.0.proj",
        "ff.net.2",
        "conv1",
    ]
    with torch.device("meta"):
        return inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), unet)


@pytest.mark.parametrize("which", PUBLISHED)
def test_partition_is_exact_and_knows_every_name(which):
    unet, (_, tensors, parameters) = published(which), PUBLISHED[which]
    groups = group_parameters(unet)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in unet.named_parameters())
    assert sum(len(group) for group in groups) == tensors and sum(groups.sizes) == parameters
    assert OTHER not in groups.names
    aside = {name for name in groups.names if name.endswith((".norm", ".io"))}
    assert all(size >= 50_000 for name, size in zip(groups.names, groups.sizes, strict=True) if name not in aside)
    for group, members in groups.members.items():
        assert group in {group_of(name) for name in members}


def test_partition_shares_of_sd1():
    groups = group_parameters(published("SD1"))
    size, total = dict(zip(groups.names, groups.sizes, strict=True)), sum(groups.sizes)

    def share(*ends):
        return sum(s for name, s in size.items() if name.endswith(ends)) / total

    assert share("xattn.k", "xattn.v") == pytest.approx(0.0223, abs=1e-4)
    assert share("resnet.conv") == pytest.approx(0.568, abs=1e-3)
    assert share(".ff") == pytest.approx(0.173, abs=1e-3)
    assert groups.names[0] == "stem.time" and groups.names[-1].startswith("up3")
    assert sum(groups.sizes) == 859_520_964


@pytest.mark.parametrize("which", PUBLISHED)
def test_partition_of_lora_covers_the_adapters_alone(which):
    unet = lora(published(which))
    groups = group_parameters(unet)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(n for n, p in unet.named_parameters() if p.requires_grad)
    assert all("lora_" in name for name in names) and OTHER not in groups.names
    assert {"mid.xattn.v", "mid.xattn.k", "mid.attn.q", "mid.ff", "mid.proj"} <= set(groups.names)


@pytest.mark.parametrize(
    "name, group",
    [
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.default.weight", "down0.xattn.k"),
        ("base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0.bias", "mid.attn.o"),
        ("module._orig_mod.up_blocks.3.attentions.2.transformer_blocks.0.ff.net.0.proj.weight", "up3.ff"),
        (
            "up_blocks.0.attentions.0.transformer_blocks.9.attn2.processor.to_v_lora.down.weight",
            "up0.xattn.v",
        ),
        ("down_blocks.1.resnets.0.conv_shortcut.weight", "down1.resnet.shortcut"),
        ("down_blocks.1.resnets.0.time_emb_proj.bias", "down1.time"),
        ("down_blocks.2.downsamplers.0.conv.weight", "down2.sampler"),
        ("add_embedding.linear_1.weight", "stem.time"),
        ("conv_norm_out.weight", "stem.norm"),
        ("conv_out.bias", "stem.io"),
        ("transformer.h.0.mlp.weight", OTHER),
    ],
)
def test_group_of_a_name(name, group):
    assert group_of(name) == group


def test_small_groups_join_the_nearest_role_of_their_stage():
    groups = group_parameters(Toy(), min_size=1500)
    assert groups.names == ["mid.ff", "up1.resnet.conv", "up1.norm"]  # k -> v -> ff; norm stays aside
    assert groups.sizes == [2900, 2500, 40]


def test_unknown_names_keep_multiplier_one(caplog):
    model = Toy(names=("strange.part", *list(NAMES.values())[1:]))
    control, optimizer = controlled(model, config())
    run(model, control, optimizer, range(12))
    assert "strange.part.weight" in caplog.text and caplog.text.count("unknown name") == 1
    assert control.multipliers[OTHER] == 1.0 and len(set(control.multipliers.values())) > 2
