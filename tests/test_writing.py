"""Files that are there whole or not at all."""

import os

import pytest

from unteach.writing import write_whole


def test_text_and_bytes_are_written_and_nothing_is_left_beside_them(tmp_path):
    for content, expected in (("añ\n", "añ\n".encode()), (b"\x00\xff", b"\x00\xff")):
        write_whole(tmp_path / "new" / "file", content)
        assert (tmp_path / "new" / "file").read_bytes() == expected
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_until_all_is_written_the_old_file_is_there(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_whole(file, "old")

    def stop(source, target):
        assert (file.read_text(), source.read_text(), target) == ("old", "new", file)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
