# source: https://github.com/PrefectHQ/prefect/pull/13948
# Tasks that are static methods, class methods and methods of a class in a module.
from checks import check
from zoo import Trainer

if __name__ == "__main__":
    check(
        (Trainer.once, (), 1),
        (Trainer.named, (), True),
        (Trainer(3).train, (4,), (12, True)),
    )
