"""Programs as people write them do under `GPUTaskRunner` what they do under Prefect's own runner for threads.

The programs are in `tests/programs`. Each is a script in a process of its own, exits with 0 only if it is right, and
names on its first line what it stands for. They run on host devices.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest

from tests.integration.programs import REPOSITORY, Workplace, workplace
from tests.process.random_scripts import make_script

PROGRAMS = REPOSITORY / "tests" / "programs"

NAMES = sorted(path.stem for path in PROGRAMS.glob("[0-9]*.py"))

#: These run in `make test`, all others in `make check`.
QUICK = {
    "12_pickle_main",
    "15_manager_proxy",
    "17_sigint_subprocess",
    "19_meta_path",
    "21_dataclass_missing",
    "25_task_run_name",
    "31_lru_cache",
    "47_nested_deadlock",
    "60_txn_data",
    "61_module_state",
    "64_codecs",
    "65_own_error",
}

#: Wrong under Prefect's `ProcessPoolTaskRunner`, each with a part of what it prints.
WRONG_IN_POOL: Mapping[str, str] = {
    "01_package_state": "cannot pickle '_contextvars.ContextVar' object",
    "02_package_errors": "('fish', 'no no fish left left')",
    "03_wrapped_task": "list index out of range",
    "06_script_beside_module": "'1 subclassed': (3, True)",
    "08_keyword_only": "name 'KW_ONLY' is not defined",
    "10_own_sentinel": "'3 back': [MISSING, <object object at",
    "12_pickle_main": "it's not the same object as __main__.Config",
    "13_attrs_nothing": "type object 'Config' has no attribute 'path'",
    "14_type_hints": "cannot specify both default and default_factory",
    "20_library_sentinels": "'==SUPPRESS=='",
    "21_dataclass_missing": "cannot specify both default and default_factory",
    "22_torch_save": "it's not the same object as __main__.Net",
    "23_joblib_shelve": "it's not the same object as __main__.Mean",
    "24_main_module": "it's not the same object as __main__.helper",
    "25_task_run_name": "An attempt has been made to start a new process",
    "26_forward_references": "cannot specify both default and default_factory",
    "28_data_loader": "it's not the same object as __main__.Squares",
    "29_pickled_results": "it's not the same object as __main__.New",
    "30_second_pickle": "it's not the same object as __main__.Job",
    "32_cached_property": "cannot pickle '_thread.RLock' object",
    "33_single_dispatch": "cannot pickle 'weakref.ReferenceType' object",
    "34_locks_and_queues": "cannot pickle '_thread.RLock' object",
    "35_common_globals": "cannot pickle '_thread.lock' object",
    "36_weak_references": "cannot pickle 'weakref.ReferenceType' object",
    "37_context_variables": "cannot pickle '_contextvars.ContextVar' object",
    "39_compiled_functions": "cannot pickle 'ConfigModuleInstance' object",
    "40_validated_calls": "maximum recursion depth exceeded",
    "41_generators_and_counters": "cannot pickle '_thread.lock' object",
    "42_open_files": "cannot pickle 'sqlite3.Connection' object",
    "43_clients_and_pools": "cannot pickle 'generator' object",
    "44_lazy_attributes": "cannot pickle '_thread.RLock' object",
    "45_keyword_errors": "KeywordError.__init__() takes 1 positional argument but 2 were given",
    "46_chained_errors": "'caused': 'HighError: failed; AssertionError(None)'",
    "48_http_errors": "missing 2 required keyword-only arguments: 'request' and 'response'",
    "50_error_attributes": "cannot pickle '_thread.lock' object",
    "51_nested_errors": "missing 1 required positional argument: 'key'",
    "52_retry_by_type": "missing 1 required keyword-only argument: 'response'",
    "58_same_name_twice": "'0 both': (2, 2, 2)",
    "60_txn_data": "AssertionError: []",
    "61_module_state": "cannot pickle '_thread.lock' object",
    "63_keras_layer": "could not be deserialized properly",
    "65_own_error": "missing 1 required keyword-only argument: 'host'",
    "66_torch_registrations": "cannot pickle '_Ops' object",
    "67_process_settings": "'virtual subclass': False",
    "68_torch_operators": "cannot pickle '_Ops' object",
    "71_warning_filters": "'drifts': 'only printed'",
    "72_logger_levels": "('levels', {'own': False",
    "73_main_process": "AssertionError",
    "78_parameters_and_models": "[True, True, True, 5, 'dict']",
    "80_rollback_reads_what_was_set": "AssertionError: []",
    "81_retry_begins_anew": "AssertionError: []",
    "83_sharing_strategy": "AssertionError",
}

#: Do not end under it.
ENDLESS_IN_POOL = {"69_joblib_parallel"}

#: Two or more of each kind, on two nodes.
ON_CLUSTER = [
    "01_package_state",
    "10_own_sentinel",
    "12_pickle_main",
    "14_type_hints",
    "15_manager_proxy",
    "17_sigint_subprocess",
    "18_start_method",
    "19_meta_path",
    "21_dataclass_missing",
    "24_main_module",
    "25_task_run_name",
    "27_only_in_a_file",
    "31_lru_cache",
    "32_cached_property",
    "35_common_globals",
    "42_open_files",
    "47_nested_deadlock",
    "50_error_attributes",
    "54_config_by_path",
    "59_assets",
    "60_txn_data",
    "61_module_state",
    "64_codecs",
    "65_own_error",
]

#: Follows a random script: what can be pickled by name is pickled in one process and loaded in the other, both ways.
PICKLES = """
import pickle

from checks import RUNNER, TAGS
from prefect import flow, task
from tests.process.random_scripts import describe

ALL = [*VALUES, *OBJECTS, *FUNCTIONS, *CLASSES]


def packed(value):
    try:
        return pickle.dumps(value)
    except Exception:
        return None


@task(tags=TAGS)
def read(data):
    return [None if each is None else describe(pickle.loads(each)) for each in data]


@task(tags=TAGS)
def write():
    return [packed(each) for each in ALL]


@flow(task_runner=RUNNER)
def main():
    data = [packed(each) for each in ALL]
    return data, read.submit(data).result(), write.submit().result()


if __name__ == "__main__":
    here = [describe(each) for each in ALL]
    data, there, back = main()
    for value, sent, read_there, written in zip(here, data, there, back, strict=True):
        assert (sent is None) == (written is None), value
        if sent is not None:
            assert read_there == value == describe(pickle.loads(written)), (value, read_there)
    print("PICKLED", sum(each is not None for each in data))
"""


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        shutil.copytree(
            PROGRAMS, made.folder / "programs", ignore=shutil.ignore_patterns("__pycache__")
        )
        yield made


def run(place: Workplace, name: str, runner: str, **settings: str) -> tuple[int, str]:
    """Run a program to its end; return its exit status and what it said.

    Args:
        place: Where its files are.
        name: Of its file, without the suffix.
        runner: "gpu", "thread" or "pool".
        **settings: Of `GPUTaskRunner`, by the ends of their environment variables.
    """
    environment = {
        f"PREFECT_INTEGRATIONS_GPU_{key}": value
        for key, value in {"DEVICES": "host", **settings}.items()
    }
    done = place.run(
        f"{name}.py",
        cwd=place.folder / "programs",
        environment={"RUNNER": runner, **environment},
        expect=None,
    )
    return done.returncode, done.stdout + done.stderr


def check(place: Workplace, name: str, runner: str, **settings: str) -> None:
    status, said = run(place, name, runner, **settings)
    assert status == 0, said


def test_the_selections_are_of_programs_that_exist() -> None:
    named = {*QUICK, *WRONG_IN_POOL, *ENDLESS_IN_POOL, *ON_CLUSTER}
    assert named <= {*NAMES}
    assert len({name[:2] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES],
)
def test_a_program_is_right_in_processes_of_tasks(place: Workplace, name: str) -> None:
    check(place, name, "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_right_with_standbys(place: Workplace, name: str) -> None:
    check(place, name, "gpu", START_METHOD="spawn", STANDBY="auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_right_in_fresh_interpreters(place: Workplace, name: str) -> None:
    check(place, name, "gpu", START_METHOD="spawn")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_right_in_threads_of_prefect(place: Workplace, name: str) -> None:
    check(place, name, "thread")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENDLESS_IN_POOL])
def test_a_program_is_right_in_the_process_pool_of_prefect_or_is_known_to_be_wrong(
    place: Workplace, name: str
) -> None:
    status, said = run(place, name, "pool")
    if name in WRONG_IN_POOL:
        assert status and WRONG_IN_POOL[name] in said, said
    else:
        assert status == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_a_random_script_pickles_is_loaded_in_the_task_and_back(
    place: Workplace, seed: int
) -> None:
    script = make_script(Random(seed), size=4) + PICKLES
    place.write(f"programs/random_{seed}.py", script)
    status, said = run(place, f"random_{seed}", "gpu")
    assert status == 0 and "PICKLED" in said, said


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, which are processes of this machine."""
    pytest.importorskip("ray")
    from tests.integration.test_cluster import started

    with started("n1") as machines:
        yield machines.address


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ON_CLUSTER)
def test_a_program_is_right_on_a_cluster_of_two_nodes(
    address: str, place: Workplace, name: str
) -> None:
    check(place, name, "gpu", ADDRESS=address, DEVICES="simulated:1x24GiB")
