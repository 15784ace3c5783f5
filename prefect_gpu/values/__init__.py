"""Transport of users' values between processes.

A value is pickled by reference or by value, replaced by a new object (as a lock is), or refused: `docs/reference.md`
has the table. `processes` and `child` have the messages that carry values.
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
