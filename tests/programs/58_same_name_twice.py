# Stands for two projects with a module of one name (`utils`, `config`): the one that the script loaded first is the one it means.
import importlib
import pathlib
import sys
import tempfile

from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())
for project, value in (("one", 1), ("two", 2)):
    (FOLDER / project).mkdir()
    (FOLDER / project / "project_utils.py").write_text(
        f"VALUE = {value}\ndef get():\n    return VALUE\nclass Kind:\n    v = VALUE\n"
    )


def load(project):
    sys.modules.pop("project_utils", None)
    sys.path.insert(0, str(FOLDER / project))
    try:
        return importlib.import_module("project_utils")
    finally:
        sys.path.pop(0)


one = load("one")
two = load("two")


@task(tags=TAGS)
def both(kind):
    return one.get(), two.get(), kind.v


@task(tags=TAGS)
def functions(first, second):
    return first(), second()


if __name__ == "__main__":
    check(
        (both, (two.Kind(),), (1, 2, 2)),
        (functions, (one.get, two.get), (1, 2)),
    )
