"""A file that is written beside and renamed."""

import pytest

from ds_adacc.kernels.atomic_write import Path, atomic_write


def test_a_file_and_its_folder_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    atomic_write(path, b"old")
    atomic_write(path, memoryview(b"new"))
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_disk_that_takes_a_part_leaves_what_was_there(before, tmp_path, monkeypatch):
    def write(self, content):
        with open(self, "wb") as file:
            file.write(content[:2])
        raise OSError("full")

    path = tmp_path / "file.bin"
    if before is not None:
        path.write_bytes(before)
    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="full"):
        atomic_write(path, b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_what_stands_in_the_way_is_an_error_and_nothing_is_left(tmp_path):
    path = tmp_path / "file.bin"
    (path / "a folder").mkdir(parents=True)
    with pytest.raises(OSError, match=r"file\.bin"):
        atomic_write(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
