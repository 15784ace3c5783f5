"""`python -m zoo`: tasks of the module that runs, with relative imports in their bodies."""

from checks import TAGS, check
from prefect import task

from .registry import Size

OFFSET = 5


@task(tags=TAGS)
def inside(x):
    from .registry import ANIMALS

    return x + OFFSET, sorted(ANIMALS)[0], Size.SMALL


if __name__ == "__main__":
    check((inside, (1,), (6, "cat", Size.SMALL)))
