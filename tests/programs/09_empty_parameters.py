# Stands for decorators and dependency injection (FastAPI, typer) that keep signatures and compare with `inspect.Parameter.empty`.
import functools
import inspect

from checks import TAGS, check
from prefect import task


def train(path, lr: float = 0.1, *, seed):
    return path, lr, seed


SIGNATURE = inspect.signature(train)
EMPTY = inspect.Parameter.empty


def required(function):
    return [
        n for n, p in inspect.signature(function).parameters.items() if p.default is inspect._empty
    ]


def with_defaults(function):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(**given):
        lacking = [
            n for n, p in signature.parameters.items() if p.default is EMPTY and n not in given
        ]
        return lacking or function(**given)

    return wrapper


@task(tags=TAGS)
def kept():
    return [n for n, p in SIGNATURE.parameters.items() if p.default is inspect.Parameter.empty]


@task(tags=TAGS)
def asked():
    return required(train), SIGNATURE.return_annotation is inspect.Signature.empty


checked = with_defaults(train)


@task(tags=TAGS)
def wrapped():
    return checked(path="p"), checked(path="p", lr=1, seed=2)


if __name__ == "__main__":
    check(
        (kept, (), ["path", "seed"]),
        (asked, (), (["path", "seed"], True)),
        (wrapped, (), (["seed"], ("p", 1, 2))),
    )
