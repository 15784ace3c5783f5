# source: https://github.com/jina-ai/serve/pull/2953
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

# Modules that a finder of the script's own finds (encrypted or generated sources, typeguard's and others' hooks).
import importlib.abc, importlib.util, sys


class Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec("K = 3\ndef triple(x):\n    return K * x\nclass Thing:\n    v = 5\n", module.__dict__)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "hidden_module_of_mine":
            return importlib.util.spec_from_loader(name, Loader())
        return None


sys.meta_path.insert(0, Finder())
import hidden_module_of_mine as hidden


@task(tags=TAGS)
def use(x):
    return hidden.triple(x) + hidden.Thing.v


@flow(task_runner=RUNNER)
def main():
    assert use.submit(2).result() == 11


if __name__ == "__main__":
    main()
