# source: https://github.com/microsoft/qlib/pull/431
# A configuration or model file loaded by its path (mmcv, detectron2, qlib), and put into `sys.modules`.
import importlib.util
import pathlib
import sys
import tempfile

from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())
(FOLDER / "model_config.py").write_text(
    """
import dataclasses

LAYERS = [4, 2]

@dataclasses.dataclass
class Model:
    depth: int
    names: list = dataclasses.field(default_factory=list)

    def size(self):
        return self.depth * LAYERS[0]

class TooDeepError(Exception):
    def __init__(self, *, depth):
        super().__init__(depth)
        self.depth = depth

def build(depth):
    if depth > 9:
        raise TooDeepError(depth=depth)
    return Model(depth)
"""
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / "model_config.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


config = load("model_config")


@task(tags=TAGS)
def built(depth):
    model = config.build(depth)
    return model.size(), isinstance(model, config.Model), model


@task(tags=TAGS)
def given(model):
    import dataclasses

    required = [f.name for f in dataclasses.fields(model) if f.default is dataclasses.MISSING]
    return model.size(), required


@task(tags=TAGS)
def failed():
    try:
        config.build(10)
    except config.TooDeepError as error:
        return error.depth


if __name__ == "__main__":
    check(
        (built, (2,), (8, True, config.Model(2))),
        (given, (config.Model(3),), (12, ["depth", "names"])),
        (failed, (), 10),
    )
