# Stands for code that is shipped as a zip archive (Spark's `--py-files`) and for `sys.path` entries that a script adds late.
import pathlib
import sys
import tempfile
import zipfile

from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())
with zipfile.ZipFile(FOLDER / "library.zip", "w") as archive:
    archive.writestr("zipped/__init__.py", "from .part import Value, twice\n")
    archive.writestr(
        "zipped/part.py",
        "cache = []\nclass Value:\n    x = 4\ndef twice(x):\n    cache.append(x)\n    return 2 * x\n",
    )
(FOLDER / "late").mkdir()
(FOLDER / "late" / "late_mod.py").write_text(
    "state = []\ndef add(x):\n    state.append(x)\n    return len(state)\n"
)
sys.path.insert(0, str(FOLDER / "library.zip"))

import zipped
from zipped import twice


@task(tags=TAGS)
def of_archive(value):
    zipped.part.cache.clear()
    return twice(3), zipped.part.cache, isinstance(value, zipped.Value)


@task(tags=TAGS)
def late():
    import late_mod

    late_mod.state.clear()
    return late_mod.add(1), late_mod.add(1)


if __name__ == "__main__":
    sys.path.append(str(FOLDER / "late"))
    check(
        (of_archive, (zipped.Value(),), (6, [3], True)),
        (late, (), (1, 2)),
    )
