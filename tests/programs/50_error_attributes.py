# Stands for exceptions that hold what no process can send: a lock, a socket, a frame. The rest arrives, and a note names what does not.
import socket
import sys
import threading

from checks import MODE, RUNNER, TAGS
from prefect import flow, task


class JobError(Exception):
    def __init__(self, text, job):
        super().__init__(text)
        self.job = job
        self.code = 5


class Job:
    def __init__(self):
        self.name = "job"
        self.socket = socket.socket()


class LockedError(ValueError):
    def __init__(self, code):
        super().__init__(f"locked {code}", lock)
        self.code = code


lock = threading.Lock()


@task(tags=TAGS)
def with_socket():
    raise JobError("lost", Job())


@task(tags=TAGS)
def with_frame():
    error = JobError("frame", None)
    error.frame = sys._getframe()
    raise error


@task(tags=TAGS)
def with_argument():
    raise LockedError(3)


@flow(task_runner=RUNNER)
def main():
    got = {}
    for each in (with_socket, with_frame, with_argument):
        try:
            each.submit().result()
        except (JobError, LockedError) as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            got[each.name] = error.code, error.args[0], notes
        except Exception as error:
            got[each.name] = f"{type(error).__name__}: {str(error)[:300]}"
    return got


if __name__ == "__main__":
    got = main()
    named = {"with_socket": "job", "with_frame": "frame"} if MODE == "gpu" else {}
    for name, code, text in (
        ("with_socket", 5, "lost"),
        ("with_frame", 5, "frame"),
        ("with_argument", 3, "locked 3"),
    ):
        assert got[name][:2] == (code, text), got
        assert named.get(name, "") in got[name][2], got
