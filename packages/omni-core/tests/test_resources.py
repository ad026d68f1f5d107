"""Paths of a config: on disk, or in a package; what is missing is named with where it was looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import omni_core
from omni_core.resources import resolve


def test_a_path_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    assert resolve(str(tmp_path / "a")) == tmp_path / "a"
    assert resolve("a", relative_to=tmp_path) == tmp_path / "a"
    monkeypatch.chdir(tmp_path)
    assert resolve("a") == Path("a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/a") == tmp_path / "a"


def test_a_missing_path_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        resolve("no/such", relative_to=tmp_path)
    assert str(tmp_path / "no/such") in str(error.value)


def test_a_path_in_a_package() -> None:
    assert omni_core.__file__ is not None
    folder = Path(omni_core.__file__).parent
    assert resolve("package:omni_core/py.typed") == folder / "py.typed"
    assert resolve("package:omni_core") == folder
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        resolve("package:omni_core/no_such_file")


@pytest.mark.parametrize(
    "path", ["package:no_such_package/x", "package:no_such.inner/x", "package:..x/y", "package:/x"]
)
def test_a_package_that_is_not_installed_is_named(path: str) -> None:
    with pytest.raises(FileNotFoundError, match="is not installed; `pip install"):
        resolve(path)


def test_looking_into_a_package_does_not_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy_data").mkdir()
    (tmp_path / "heavy_data" / "__init__.py").write_text("")
    (tmp_path / "heavy_data" / "file.txt").write_text("x")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert resolve("package:heavy_data/file.txt").read_text() == "x"
    finally:
        sys.modules.pop("heavy_data", None)
