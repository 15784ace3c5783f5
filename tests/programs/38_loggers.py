# Stands for loggers of a script: with handlers that hold streams and locks, adapters, filters, and as attributes.
import io
import logging

from checks import TAGS, check
from prefect import task

stream = io.StringIO()
log = logging.getLogger("project")
log.setLevel(logging.DEBUG)
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
log.addHandler(handler)
adapter = logging.LoggerAdapter(log, {"run": 7})
to_stream = logging.StreamHandler(stream)


class Only(logging.Filter):
    def filter(self, record):
        return record.levelno >= logging.WARNING


only = Only("project")


class Trainer:
    log = logging.getLogger("project.trainer")

    def __init__(self):
        self.own = logging.getLogger(f"project.{type(self).__name__}")

    def run(self):
        self.log.info("class")
        self.own.warning("own")
        return self.own.name, self.log.parent is logging.getLogger("project")


@task(tags=TAGS)
def logs():
    log.debug("debug")
    adapter.info("adapted")
    return log is logging.getLogger("project"), adapter.extra, adapter.logger is log


@task(tags=TAGS)
def filtered():
    return only.filter(logging.makeLogRecord({"levelno": logging.ERROR})), only.name


@task(tags=TAGS)
def trainer(given):
    return given.run(), Trainer().run()[1]


if __name__ == "__main__":
    check(
        (logs, (), (True, {"run": 7}, True)),
        (filtered, (), (True, "project")),
        (trainer, (Trainer(),), (("project.Trainer", True), True)),
    )
