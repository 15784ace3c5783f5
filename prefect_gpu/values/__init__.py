"""Transport of users' values between processes.

A value is pickled by reference or by value, replaced by a new object (as a lock is), or refused: `docs/reference.md`
has the table. `processes` and `child` have the messages that carry values.
"""

from prefect_gpu.values.importable import is_importable as is_importable
from prefect_gpu.values.importable import private_modules as private_modules
from prefect_gpu.values.importable import travels_by_value as travels_by_value
from prefect_gpu.values.importable import users_modules as users_modules
from prefect_gpu.values.pickling import Apart as Apart
from prefect_gpu.values.pickling import attribute as attribute
from prefect_gpu.values.pickling import check as check
from prefect_gpu.values.pickling import dump_exception as dump_exception
from prefect_gpu.values.pickling import dumps as dumps
from prefect_gpu.values.pickling import load_call as load_call
from prefect_gpu.values.pickling import loads as loads
from prefect_gpu.values.pickling import refuse_shared as refuse_shared
from prefect_gpu.values.transport import ArgumentFiles as ArgumentFiles
from prefect_gpu.values.transport import Share as Share
from prefect_gpu.values.transport import argument_files as argument_files
