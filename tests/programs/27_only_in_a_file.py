# source: https://github.com/DataBiosphere/toil/issues/423
# A class that the task reaches only by reading a file: nothing in the task's code names it.
import pathlib
import pickle
import tempfile

from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())


class Base:
    factor = 3

    def scaled(self):
        return self.x * self.factor


class Sample(Base):
    def __init__(self, x):
        self.x = x

    class Inner:
        kind = "inner"

    def __reduce__(self):
        return make, (self.x,)


def make(x):
    return Sample(x)


@task(tags=TAGS)
def read(path):
    sample, inner, function = pickle.loads(path.read_bytes())
    return sample.scaled(), inner.kind, function(5).x, type(sample).__name__


@task(tags=TAGS)
def missing(path):
    try:
        return pickle.loads(path.read_bytes())
    except AttributeError as error:
        return "Gone" in str(error)


if __name__ == "__main__":
    (FOLDER / "a.pkl").write_bytes(pickle.dumps((Sample(2), Sample.Inner(), make)))

    class Gone:
        pass

    (FOLDER / "gone.pkl").write_bytes(pickle.dumps(Gone()))
    del Gone
    check(
        (read, (FOLDER / "a.pkl",), (6, "inner", 5, "Sample")),
        (missing, (FOLDER / "gone.pkl",), True),
    )
