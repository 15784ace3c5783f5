"""Transport of users' values between processes.

These modules decide whether a value travels by reference or by value, is made anew or is refused; `docs/reference.md`
has the table. `processes` and `child` have the messages and their order.
"""

from prefect_gpu.values.argument_files import ArgumentFiles, Share, argument_files
from prefect_gpu.values.importable import (
    is_importable,
    private_modules,
    travels_by_value,
    users_modules,
)
from prefect_gpu.values.pickling import (
    Apart,
    attribute,
    check,
    dump_exception,
    dumps,
    load_call,
    loads,
    refuse_shared,
)

__all__ = [
    "Apart",
    "ArgumentFiles",
    "Share",
    "argument_files",
    "attribute",
    "check",
    "dump_exception",
    "dumps",
    "is_importable",
    "load_call",
    "loads",
    "private_modules",
    "refuse_shared",
    "travels_by_value",
    "users_modules",
]
