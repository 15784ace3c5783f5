# Stands for `@task` above a decorator of the project that keeps state in its module; also with other options.
from checks import RUNNER
from prefect import flow
from zoo import score


@flow(task_runner=RUNNER)
def main():
    renamed = score.with_options(name="scored again", retries=1)
    return score.submit(2).result(), renamed.submit(3).result()


if __name__ == "__main__":
    got = main()
    assert got == ((4, "score"), (6, "score")), got
