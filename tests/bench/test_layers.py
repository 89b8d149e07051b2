"""The benchmarks of layers that train and of spectral updates run, on the bundled UNet."""

from bench import layers, spectral


def test_fewer_layers_cost_less(capsys):
    ratios = layers.main(["--smoke", "--batch", "2"])
    assert ratios.keys() == layers.ARMS.keys()
    assert ratios["all"] == 1 and ratios["up1"] < 0.9
    assert "53.8%" in capsys.readouterr().out


def test_spectral_updates_are_timed():
    ratios = spectral.main(["--smoke"])
    assert ratios.keys() == spectral.ARMS.keys() and ratios["default"] == 1
    assert ratios["AdamW for time, proj"] < 1
