"""How a mistake is said: one printable line."""

import pytest
from PIL import Image

from silentbad.errors import UserError, first_line, user_errors
from tests.recoveries import make_hook
from tests.tiny import tiny_pipeline


def test_an_error_does_nothing_to_a_terminal():
    text = str(UserError("no file a\x1b[2J\u2028b\r\ud83d\nof 🐈"))
    assert text == "no file a\\x1b[2J\\u2028b\\r\\ud83d of 🐈" and text.isprintable()


def test_reading_tells_whose_mistake_it_is():
    with pytest.raises(UserError, match=r"^cannot read x \(no colon\)$"), user_errors("cannot read x"):
        raise ValueError("no colon\nand more")
    with pytest.raises(UserError, match="^ours$"), user_errors("cannot read x"):
        raise UserError("ours")


def test_a_number_that_python_does_not_read_is_named():
    try:
        int("9" * 5000)
    except ValueError as error:
        assert first_line(error).endswith("5000 digits")


def test_an_audit_on_a_full_disk_is_one_line(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, threshold=0.5)
    monkeypatch.setattr(
        Image.Image, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(UserError, match="cannot write .*png .*No space left"):
        hook.run(0, 0, tiny_pipeline().unet)
