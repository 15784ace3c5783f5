# source: https://github.com/cloudpipe/cloudpickle/issues/398
# Registries, counters and caches of a package's modules, used by a task that the package re-exports.
from checks import check
from zoo import registered, wake

if __name__ == "__main__":
    check(
        (registered, (), (["cat", "dog"], True, True, 1, True, True)),
        (wake, (), (True, "task")),
    )
