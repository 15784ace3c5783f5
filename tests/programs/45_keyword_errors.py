# source: https://github.com/python/cpython/issues/120810
# Exceptions of a script whose constructors take other arguments than `args` has: the flow catches them by type.
import errno
import json

from checks import RUNNER, TAGS
from prefect import flow, task


class KeywordError(Exception):
    def __init__(self, *, code, detail=None):
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class FieldsError(Exception):
    def __init__(self, left, right):
        self.left = left
        self.right = right

    def __str__(self):
        return f"{self.left} is not {self.right}"


class DiskError(OSError):
    def __init__(self, path, free_bytes):
        super().__init__(errno.ENOSPC, "no space", path)
        self.free_bytes = free_bytes


class SlotsError(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__()
        self.code = code


class ReducedError(Exception):
    def __init__(self, a, b):
        super().__init__("reduced")
        self.a, self.b = a, b

    def __reduce__(self):
        return ReducedError, (self.a, self.b)


MADE = {
    "keyword": lambda: KeywordError(code=3, detail={"a": [1]}),
    "fields": lambda: FieldsError(1, right=2),
    "disk": lambda: DiskError("/data", 12),
    "slots": lambda: SlotsError(7),
    "reduced": lambda: ReducedError(1, 2),
    "json": lambda: json.loads("{]"),
    "unicode": lambda: b"\xff".decode("utf-8"),
}


@task(tags=TAGS)
def fail(name):
    raise MADE[name]()


@flow(task_runner=RUNNER)
def caught(name):
    try:
        fail.submit(name).result()
    except KeywordError as error:
        return error.code, error.detail, str(error), error.args
    except FieldsError as error:
        return error.left, error.right, str(error)
    except DiskError as error:
        return error.errno, error.filename, error.free_bytes, isinstance(error, OSError)
    except SlotsError as error:
        return error.code
    except ReducedError as error:
        return error.a, error.b, str(error)
    except json.JSONDecodeError as error:
        return error.pos, error.doc, error.lineno
    except UnicodeDecodeError as error:
        return error.object, error.start, error.encoding
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


WANTED = {
    "keyword": (3, {"a": [1]}, "code 3", ("code 3",)),
    "fields": (1, 2, "1 is not 2"),
    "disk": (errno.ENOSPC, "/data", 12, True),
    "slots": 7,
    "reduced": (1, 2, "reduced"),
    "json": (1, "{]", 1),
    "unicode": (b"\xff", 0, "utf-8"),
}

if __name__ == "__main__":
    got = {name: caught(name) for name in WANTED}
    bad = {name: each for name, each in got.items() if each != WANTED[name]}
    assert not bad, bad
