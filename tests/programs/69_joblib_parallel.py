# Stands for grid searches that start workers of joblib inside a task (scikit-learn with `n_jobs`).
# The workers get functions and objects of the script.
import joblib
from checks import TAGS, check
from prefect import task

FACTOR = 3


class Mean:
    def __init__(self, scale):
        self.scale = scale

    def fit(self, x):
        self.mean = self.scale * sum(x) / len(x)
        return self


def fitted(model, x):
    return model.fit(scaled(x))


def scaled(x):
    return [FACTOR * each for each in x]


@task(tags=TAGS)
def workers():
    made = joblib.Parallel(n_jobs=2)(
        joblib.delayed(fitted)(Mean(scale), [2, 4]) for scale in (1.0, 2.0)
    )
    return [each.mean for each in made], all(isinstance(each, Mean) for each in made)


if __name__ == "__main__":
    check((workers, (), ([9.0, 18.0], True)))
