# source: https://github.com/pallets/jinja/pull/2029
# Singletons of libraries, which are known by a name of their module.
import argparse
import contextlib
import unittest.mock

import numpy as np
import torch
from checks import TAGS, check
from jinja2.utils import missing
from prefect import task

KEPT = {
    "sentinel": unittest.mock.sentinel.start,
    "missing": missing,
    "default": unittest.mock.DEFAULT,
}
CHOICES = [NotImplemented, Ellipsis, np.ma.masked, np.newaxis, torch.strided, torch.float16]


@task(tags=TAGS)
def same(given):
    return (
        KEPT["sentinel"] is unittest.mock.sentinel.start,
        KEPT["missing"] is missing,
        KEPT["default"] is unittest.mock.DEFAULT,
        given is unittest.mock.sentinel.given,
        CHOICES[0] is NotImplemented and CHOICES[1] is Ellipsis,
        CHOICES[2] is np.ma.masked and CHOICES[3] is None,
        CHOICES[4] is torch.strided and CHOICES[5] is torch.float16,
    )


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--name", default=argparse.SUPPRESS)


@task(tags=TAGS)
def parsed():
    # `argparse.SUPPRESS` is a text that argparse compares by `is`; the option `--help` has it, too.
    with contextlib.suppress(SystemExit):
        return vars(parser.parse_args(["--lr", "2"]))


if __name__ == "__main__":
    check(
        (same, (unittest.mock.sentinel.given,), (True,) * 7),
        (parsed, (), {"lr": 2.0}),
    )
