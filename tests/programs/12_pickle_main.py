# source: https://github.com/pytorch/pytorch/issues/7812
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

# A checkpoint of an object whose class is in the script: written by the script, read in the task, and the other way.
import pickle, tempfile, pathlib
from dataclasses import dataclass


@dataclass
class Config:
    lr: float


FOLDER = pathlib.Path(tempfile.mkdtemp())


@task(tags=TAGS)
def read(path):
    c = pickle.loads(path.read_bytes())
    return c.lr


@task(tags=TAGS)
def write(path):
    path.write_bytes(pickle.dumps(Config(0.5)))


@flow(task_runner=RUNNER)
def main():
    (FOLDER / "a.pkl").write_bytes(pickle.dumps(Config(0.25)))
    out = []
    for f in (read.submit(FOLDER / "a.pkl"), write.submit(FOLDER / "b.pkl")):
        try:
            out.append(f.result())
        except Exception as e:
            out.append(f"{type(e).__name__}: {e}")
    print(out)
    assert out == [0.25, None], out
    assert pickle.loads((FOLDER / "b.pkl").read_bytes()) == Config(0.5)


if __name__ == "__main__":
    main()
