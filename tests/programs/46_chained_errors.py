# Stands for exceptions with a cause, a context and notes, and groups of them, as task groups and retries raise them.
import sys

from checks import RUNNER, TAGS
from prefect import flow, task


class LowError(Exception):
    def __init__(self, *, where):
        super().__init__(where)
        self.where = where


class HighError(RuntimeError):
    pass


@task(tags=TAGS)
def caused():
    try:
        raise LowError(where="disk")
    except LowError as low:
        high = HighError("failed")
        if sys.version_info >= (3, 11):
            high.add_note("while saving")
        raise high from low


@task(tags=TAGS)
def in_context():
    try:
        {}["key"]
    except KeyError:
        raise HighError("second")


@task(tags=TAGS)
def hidden():
    try:
        {}["key"]
    except KeyError:
        raise HighError("alone") from None


@task(tags=TAGS)
def grouped():
    raise ExceptionGroup("many", [LowError(where="a"), ExceptionGroup("inner", [HighError("b")])])


@flow(task_runner=RUNNER)
def main():
    bad = {}
    for each in (caused, in_context, hidden, *([grouped] if sys.version_info >= (3, 11) else [])):
        try:
            each.submit().result()
        except BaseException as error:
            try:
                look(each.name, error)
            except Exception as problem:
                bad[each.name] = f"{type(error).__name__}: {str(error)[:200]}; {problem!r}"
    return bad


def look(name, error):
    if name == "caused":
        assert type(error) is HighError and isinstance(error.__cause__, LowError), error.__cause__
        assert error.__cause__.where == "disk"
        assert getattr(error, "__notes__", ["while saving"]) == ["while saving"], error.__notes__
    elif name == "in_context":
        assert type(error) is HighError and isinstance(error.__context__, KeyError), (
            error.__context__
        )
    elif name == "hidden":
        assert type(error) is HighError and error.__suppress_context__
    else:
        low, rest = error.split(LowError)
        assert low.exceptions[0].where == "a"
        assert type(rest.exceptions[0].exceptions[0]) is HighError


if __name__ == "__main__":
    bad = main()
    assert not bad, bad
