# source: https://github.com/tensorflow/tensorflow/issues/32159
# A custom layer and a function of the script that Keras knows by registration: a model as argument, as result and in a file.
import os
import pathlib
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras
import numpy as np
from checks import TAGS, check
from prefect import task

FOLDER = pathlib.Path(tempfile.mkdtemp())


@keras.saving.register_keras_serializable(package="Project")
class Scale(keras.layers.Layer):
    def __init__(self, by=2.0, **kwargs):
        super().__init__(**kwargs)
        self.by = by

    def call(self, x):
        return x * self.by

    def get_config(self):
        return {**super().get_config(), "by": self.by}


@keras.saving.register_keras_serializable(package="Project")
def clipped(x):
    return keras.ops.minimum(x, 5.0)


def make(by):
    return keras.Sequential([keras.Input((1,)), Scale(by), keras.layers.Activation(clipped)])


def predicted(model):
    return model(np.ones((1, 1), "float32")).numpy().tolist()


@task(tags=TAGS)
def given(model):
    return predicted(model), isinstance(model.layers[0], Scale)


@task(tags=TAGS)
def loaded(path):
    return predicted(keras.models.load_model(path))


@task(tags=TAGS)
def returned():
    return make(4.0)


class Predicts:
    def __init__(self, value):
        self.value = value

    def __eq__(self, model):
        return predicted(model) == self.value if isinstance(model, keras.Model) else False


if __name__ == "__main__":
    make(3.0).save(FOLDER / "model.keras")
    check(
        (given, (make(2.0),), ([[2.0]], True)),
        (loaded, (FOLDER / "model.keras",), [[3.0]]),
        (returned, (), Predicts([[4.0]])),
    )
