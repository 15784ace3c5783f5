# Stands for exceptions of classes inside classes (Django's `Model.DoesNotExist`, botocore's factories) and inside functions.
from checks import RUNNER, TAGS
from prefect import flow, task


class Model:
    class DoesNotExist(LookupError):
        def __init__(self, model, key):
            super().__init__(f"no {model} {key}")
            self.key = key


class Errors:
    def __init__(self):
        self.Throttled = type("Throttled", (Exception,), {"retry_after": 3})


errors = Errors()


def make():
    class LocalError(Exception):
        def __init__(self, *, n):
            super().__init__()
            self.n = n

    return LocalError


Local = make()


@task(tags=TAGS)
def fail(kind):
    raise {
        "nested": lambda: Model.DoesNotExist("cat", 4),
        "factory": lambda: errors.Throttled("slow"),
        "local": lambda: Local(n=2),
        "made": lambda: make()(n=6),
    }[kind]()


@flow(task_runner=RUNNER)
def main():
    got = []
    for kind in ("nested", "factory", "local", "made"):
        try:
            fail.submit(kind).result()
        except Model.DoesNotExist as error:
            got.append((error.key, str(error)))
        except errors.Throttled as error:
            got.append((error.retry_after, str(error)))
        except Local as error:
            got.append(error.n)
        except Exception as error:
            got.append((type(error).__name__, getattr(error, "n", str(error)[:300])))
    return got


if __name__ == "__main__":
    got = main()
    assert got == [(4, "no cat 4"), (3, "slow"), 2, ("LocalError", 6)], got
