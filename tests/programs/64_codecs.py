# Stands for registrations at the top of a script in a registry of the standard library: codecs, error handlers, `copyreg`, ABCs.
import abc
import codecs
import copyreg
import sqlite3

from checks import TAGS, Noted, check
from prefect import task


def search(name):
    if name == "backwards":
        return codecs.CodecInfo(
            lambda s, e="": (s[::-1].encode(), len(s)),
            lambda b, e="": (bytes(b).decode()[::-1], len(b)),
        )


codecs.register(search)
codecs.register_error("stars", lambda error: ("*" * (error.end - error.start), error.end))


class Database:
    def __init__(self, path):
        self.path = path
        self.connection = sqlite3.connect(path, check_same_thread=False)


copyreg.pickle(Database, lambda database: (Database, (database.path,)))
shared = Database(":memory:")


class Plugin(abc.ABC):
    """Of the script, as is what it knows."""


@Plugin.register
class Mine:
    pass


@task(tags=TAGS)
def encoded():
    return "abc".encode("backwards")


@task(tags=TAGS)
def replaced():
    return "aé".encode("ascii", "stars")


@task(tags=TAGS)
def reduced(database):
    return database.connection.execute("select 2").fetchone(), shared.connection.execute(
        "select 3"
    ).fetchone()


@task(tags=TAGS)
def abstract():
    return isinstance(Mine(), Plugin), issubclass(Mine, Plugin)


if __name__ == "__main__":
    check(
        (encoded, (), Noted(LookupError, b"cba")),
        (replaced, (), Noted(LookupError, b"a*")),
        (reduced, (Database(":memory:"),), ((2,), (3,))),
        (abstract, (), (True, True)),
    )
