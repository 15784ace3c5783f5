# Stands for iterators and random generators that a script keeps in globals: their state travels, and so does a shared lock.
import decimal
import functools
import itertools
import operator
import random
import re
import threading

import numpy as np
import torch
from checks import TAGS, check
from prefect import task

ids = itertools.count(5)
rng = random.Random(3)
numbers = np.random.default_rng(3)
torch_numbers = torch.Generator().manual_seed(3)
word = re.compile(r"(?P<w>\w+)", re.IGNORECASE)
context = decimal.Context(prec=4)
first = operator.itemgetter(0)
lock = threading.Lock()


def guarded(lock, x):
    with lock:
        return x


call = functools.partial(guarded, lock)


@task(tags=TAGS)
def counted():
    return next(ids) >= 5, word.match("ab")["w"], context.divide(decimal.Decimal(1), 3), first("xy")


@task(tags=TAGS)
def drawn():
    expected = random.Random(3), np.random.default_rng(3), torch.Generator().manual_seed(3)
    return (
        rng.random() == expected[0].random(),
        numbers.random() == expected[1].random(),
        torch.rand(1, generator=torch_numbers).item()
        == torch.rand(1, generator=expected[2]).item(),
    )


@task(tags=TAGS)
def called():
    # One lock: that of the partial function is that of the global.
    return call(4), call.args[0] is lock


if __name__ == "__main__":
    check(
        (counted, (), (True, "ab", decimal.Decimal("0.3333"), "x")),
        (drawn, (), (True, True, True)),
        (called, (), (4, True)),
    )
