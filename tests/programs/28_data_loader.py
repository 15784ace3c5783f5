# source: https://github.com/pytorch/pytorch/issues/87016
# A `DataLoader` with workers, and processes of `multiprocessing`, over classes of the script.
import multiprocessing

import torch
from checks import TAGS, check
from prefect import task
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Sample(index)


class Sample:
    def __init__(self, index):
        self.x = index * index


def collate(samples):
    return torch.tensor([sample.x for sample in samples])


def seed(worker):
    torch.manual_seed(worker)


@task(tags=TAGS)
def load(method):
    loader = DataLoader(
        Squares(),
        batch_size=2,
        num_workers=1,
        collate_fn=collate,
        worker_init_fn=seed,
        multiprocessing_context=method,
    )
    return torch.cat(list(loader)).tolist()


def put(queue):
    queue.put(Sample(3))


@task(tags=TAGS)
def spawned():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    got = queue.get(timeout=120)
    process.join()
    return isinstance(got, Sample), got.x


if __name__ == "__main__":
    check(
        (load, ("spawn",), [0, 1, 4, 9]),
        (spawned, (), (True, 9)),
    )
