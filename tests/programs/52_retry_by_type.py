# Stands for retries of clients (openai, boto3) that ask for an exception by its type and its fields.
# Retries, `State.result`, and a hook of a failed task.
import pathlib
import tempfile

from checks import RUNNER, TAGS
from prefect import flow, task

COUNT = pathlib.Path(tempfile.mkdtemp())
SEEN = []


class RateLimitError(Exception):
    def __init__(self, message, *, response, body=None):
        super().__init__(message)
        self.response = response
        self.body = body


class FatalError(RateLimitError):
    pass


async def may_retry(task, run, state):
    try:
        await state.aresult()
    except FatalError:
        return False
    except RateLimitError as error:
        return error.response["status"] == 429
    except Exception:
        return False


def note(task, run, state):
    error = state.result(raise_on_failure=False)
    SEEN.append((type(error).__name__, error.body))


@task(tags=TAGS, retries=2, retry_condition_fn=may_retry, on_failure=[note])
def call(kind):
    tried = len(list(COUNT.glob(f"{kind}*"))) + 1
    (COUNT / f"{kind}{tried}").touch()
    if kind == "fatal":
        raise FatalError("no", response={"status": 429}, body="b")
    if tried < 3:
        raise RateLimitError("slow", response={"status": 429})
    return tried


@flow(task_runner=RUNNER)
def main():
    state = call.submit("fatal", return_state=True)
    error = state.result(raise_on_failure=False)
    return call.submit("busy").result(), type(error) is FatalError, len(list(COUNT.glob("fatal*")))


if __name__ == "__main__":
    got = main()
    assert got == (3, True, 1), got
    assert SEEN == [("FatalError", "b")], SEEN
