# Stands for open files, sockets and connections of a script: a task cannot have them, and the error says which and what to do.
import socket
import sqlite3
import tempfile

from checks import TAGS, Refused, check
from prefect import task

results = tempfile.TemporaryFile("w+")
database = sqlite3.connect(":memory:", check_same_thread=False)
server = socket.socket()


class Store:
    def __init__(self):
        self.parts = {"connection": database}


@task(tags=TAGS)
def write():
    return results.write("line")


@task(tags=TAGS)
def query():
    return database.execute("select 1").fetchone()


@task(tags=TAGS)
def listen():
    return server.fileno() >= 0


@task(tags=TAGS)
def stored(store):
    return store.parts["connection"].execute("select 2").fetchone()


@task(tags=TAGS)
def made_inside():
    with sqlite3.connect(":memory:") as own:
        return own.execute("select 3").fetchone()


if __name__ == "__main__":
    check(
        (write, (), Refused("results", 4)),
        (query, (), Refused("database", (1,))),
        (listen, (), Refused("server", True)),
        (stored, (Store(),), Refused("store.parts['connection']", (2,))),
        (made_inside, (), (3,)),
    )
