# Stands for reports of dask and Ray where `except`, `isinstance` or `is` fail with classes of a module that arrived twice.
from checks import RUNNER, check
from prefect import flow
from zoo import describe, short_of_food
from zoo.jobs import Dog
from zoo.registry import FoodError, Size


@flow(task_runner=RUNNER)
def feed():
    try:
        short_of_food.submit("fish").result()
    except FoodError as error:
        return error.kind, str(error)


if __name__ == "__main__":
    check((describe, (Dog("rex"), Size.LARGE), (True, True, True, Size.SMALL)))
    got = feed()
    assert got == ("fish", "no fish left"), got
