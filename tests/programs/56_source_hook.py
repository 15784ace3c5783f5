# Stands for import hooks that compile or change sources (typeguard, hy, macropy, pytest, languages of a project).
import importlib.abc
import importlib.machinery
import pathlib
import sys
import tempfile

from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())
(FOLDER / "shapes.dsl").write_text("value SIDES = 4\nclass Shape:\n    name = 'square'\n")


class DslLoader(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        data = super().get_data(path)
        return data.replace(b"value ", b"") if path.endswith(".dsl") else data


class DslFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        file = FOLDER / f"{name}.dsl"
        if not file.exists():
            return None
        return importlib.util.spec_from_file_location(name, file, loader=DslLoader(name, str(file)))


import importlib.util

sys.meta_path.append(DslFinder())
sys.dont_write_bytecode = True
import shapes


@task(tags=TAGS)
def sides():
    return shapes.SIDES, shapes.Shape().name


@task(tags=TAGS)
def given(shape):
    return shape.name, type(shape) is shapes.Shape


if __name__ == "__main__":
    check(
        (sides, (), (4, "square")),
        (given, (shapes.Shape(),), ("square", True)),
    )
