"""A page before a run: what training sees, and what a verdict is measured against."""

from train_silentbad import main


def test_a_preview_is_a_page_and_nothing_else(flags, data, tmp_path, capsys):
    page = tmp_path / "sheet.html"
    settings = {
        "validation.targets": data / "targets.jsonl",
        "validation.embedder": "ssim",
        "validation.num_inference_steps": 1,
    }
    assert main(flags(preview=page, **settings)) == 0
    assert str(page) in capsys.readouterr().out and not (tmp_path / "run").exists()
    text = page.read_text()
    assert text.count("<img") > 12 and "plain grey" in text and "through the autoencoder" in text
    assert "a perfect copy scores" in text and "threshold" in text


def test_a_preview_that_cannot_be_written_is_one_line(flags, tmp_path, capsys):
    assert main(flags(preview=tmp_path / "nowhere" / "sheet.html", **{"validation.targets": "null"})) == 2
    assert "sheet.html" in capsys.readouterr().err.splitlines()[-1]
