# Stands for models kept with joblib, shelve and copy: each pickles by the name of a class of the script.
import copy
import pathlib
import shelve
import tempfile

import joblib
from checks import TAGS, check
from prefect import task
from sklearn.base import BaseEstimator, clone

FOLDER = pathlib.Path(tempfile.mkdtemp())


class Mean(BaseEstimator):
    def __init__(self, scale=1.0):
        self.scale = scale

    def fit(self, x):
        self.mean_ = self.scale * sum(x) / len(x)
        return self


@task(tags=TAGS)
def fit(path):
    model = clone(Mean(scale=2.0)).fit([1, 2, 3])
    joblib.dump(model, path)
    return joblib.load(path).mean_, copy.deepcopy(model).mean_


@task(tags=TAGS)
def stored(path):
    with shelve.open(str(path)) as shelf:
        shelf["new"] = Mean(3.0)
        return isinstance(shelf["old"], Mean), shelf["old"].scale


if __name__ == "__main__":
    with shelve.open(str(FOLDER / "shelf")) as shelf:
        shelf["old"] = Mean(1.5)
    check(
        (fit, (FOLDER / "model.joblib",), (4.0, 4.0)),
        (stored, (FOLDER / "shelf",), (True, 1.5)),
    )
    assert isinstance(joblib.load(FOLDER / "model.joblib"), Mean)
    with shelve.open(str(FOLDER / "shelf")) as shelf:
        assert shelf["new"].scale == 3.0
