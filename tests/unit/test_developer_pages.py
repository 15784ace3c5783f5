"""The tables of threads, locks and modules in the pages for developers name what the code has, and nothing else."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "prefect_gpu"

#: Functions that start a thread, and the position of the thread's name among their arguments; `None`: they give it none.
STARTS = {
    "start_thread": 1,
    "run_uninterrupted": 1,
    "Thread": 2,
    "ThreadPoolExecutor": 1,
    "Timer": None,
    "ThreadPool": None,
    "start_new_thread": None,
    "to_thread": None,
}

LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "allocate_lock"}

#: These start a thread under the name that their caller gives.
FORWARDERS = {"start_thread", "run_uninterrupted"}


class Finder(ast.NodeVisitor):
    """Collects the names of threads and locks in the code of one module."""

    def __init__(self, code: str) -> None:
        self.threads: set[str] = set()
        self.locks: set[str] = set()
        self._above: list[ast.AST] = []
        tree = ast.parse(code)
        self._constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._take_call(node)
        elif isinstance(node, ast.keyword) and node.arg == "default_factory":
            if _last_name(node.value) in LOCKS:
                self._take_lock(node)
        self._above.append(node)
        super().generic_visit(node)
        self._above.pop()

    def _take_call(self, call: ast.Call) -> None:
        function = _last_name(call.func)
        if function in LOCKS:
            self._take_lock(call)
        if function in STARTS and FORWARDERS.isdisjoint(self._scope()):
            self.threads.add(self._thread_name(call, function))

    def _thread_name(self, call: ast.Call, function: str) -> str:
        position = STARTS[function]
        value = next(
            (each.value for each in call.keywords if each.arg in ("name", "thread_name_prefix")),
            None,
        )
        if value is None and position is not None and len(call.args) > position:
            value = call.args[position]
        name = self._text(value)
        if name is None:
            return f"{'.'.join(self._scope())} starts one without a name that can be read"
        return f"{name}_N" if function == "ThreadPoolExecutor" else name

    def _text(self, value: ast.expr | None) -> str | None:
        """Return a literal text, with `N` for each number that is put into it."""
        if isinstance(value, ast.Constant):
            return str(value.value)
        if isinstance(value, ast.Name):
            found = self._constants.get(value.id)
            return None if found is None else str(found)
        if isinstance(value, ast.JoinedStr):
            return "".join(self._text(part) or "N" for part in value.values)
        if isinstance(value, ast.FormattedValue):
            return self._text(value.value)
        return None

    def _take_lock(self, node: ast.AST) -> None:
        for above in reversed(self._above):
            if isinstance(above, ast.Call) and _last_name(above.func) == "type":
                return
            if isinstance(above, ast.Call) and _last_name(above.func) == "setdefault":
                assert isinstance(above.func, ast.Attribute)
                self._add_lock(above.func.value)
                return
            if isinstance(above, ast.AnnAssign):
                self._add_lock(above.target)
                return
            if isinstance(above, ast.Assign):
                for target in above.targets:
                    self._add_lock(_matching(target, above.value, node))
                return
        self.locks.add(f"{'.'.join(self._scope())} makes one without a name")

    def _add_lock(self, target: ast.expr) -> None:
        scope = self._scope()
        text = ast.unparse(target)
        if text.startswith("self."):
            text = ".".join([*self._classes(), text.removeprefix("self.")])
        elif isinstance(target, ast.Name):
            text = ".".join([*scope, text])
        self.locks.add(text)

    def _classes(self) -> list[str]:
        return [each.name for each in self._above if isinstance(each, ast.ClassDef)]

    def _scope(self) -> list[str]:
        return [
            each.name
            for each in self._above
            if isinstance(each, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _matching(target: ast.expr, value: ast.expr, node: ast.AST) -> ast.expr:
    """Return the target of `node` in `a, b = Lock(), Event()`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, each in zip(target.elts, value.elts, strict=True):
            if node in ast.walk(each):
                return one
    return target


@functools.cache
def _in_code() -> tuple[frozenset[str], frozenset[str]]:
    """Return the threads and the locks of the package, each as "module: name"."""
    threads: set[str] = set()
    locks: set[str] = set()
    named = re.compile("|".join(rf"\b{name}\b" for name in (*STARTS, *LOCKS)))
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        code = path.read_text(encoding="utf-8")
        if named.search(code):
            found = Finder(code)
            threads |= {f"{module}: {name}" for name in found.threads}
            locks |= {f"{module}: {name}" for name in found.locks}
    return frozenset(threads), frozenset(locks)


def _rows(section: str) -> list[list[str]]:
    """Return the cells of each row of the table in a section of the page of threads and locks."""
    page = (REPOSITORY / "docs" / "concurrency.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]


THREADS = _rows("Threads")
LOCK_ROWS = _rows("Locks")


@pytest.mark.parametrize(("kind", "rows"), [(0, THREADS), (1, LOCK_ROWS)], ids=["threads", "locks"])
def test_the_page_of_threads_and_locks_has_those_of_the_code(
    kind: int, rows: list[list[str]]
) -> None:
    in_page = {f"{module}: {name}" for module, name, *_ in rows}
    _assert_same(in_page, set(_in_code()[kind]), "concurrency")


def _assert_same(in_page: set[str], in_code: set[str], page: str) -> None:
    missing, gone = sorted(in_code - in_page), sorted(in_page - in_code)
    assert not missing, f"missing in docs/{page}.md: {', '.join(missing)}"
    assert not gone, f"in docs/{page}.md, but not in the code: {', '.join(gone)}"


@pytest.mark.parametrize("rows", [THREADS, LOCK_ROWS], ids=["threads", "locks"])
def test_rows_are_sorted_and_complete(rows: list[list[str]]) -> None:
    assert [row[:2] for row in rows] == sorted(row[:2] for row in rows)
    assert [row for row in rows if len(row) != len(rows[0]) or not all(row)] == []


def test_names_of_threads_and_locks_are_found() -> None:
    found = Finder(
        """
NAME = "engine"
_ready = threading.Condition()
KIND = type(threading.Lock())

class Pool:
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __init__(self, number):
        self._lock, self._open = RLock(), True
        self._making.setdefault(number, threading.Lock())
        start_thread(self._run, f"{NAME}_{number}")
        threading.Thread(target=self._run, name="sampler").start()
        threading.Thread(target=self._run).start()
        return ThreadPoolExecutor(1, "worker")

def start_thread(target, name):
    writes = threading.Semaphore()
    place.turn = threading.Condition()
    threading.Thread(target=target, name=name).start()
"""
    )
    assert found.threads == {
        "engine_N",
        "sampler",
        "worker_N",
        "Pool.__init__ starts one without a name that can be read",
    }
    assert found.locks == {
        "_ready",
        "Pool.lock",
        "Pool._lock",
        "Pool._making",
        "start_thread.writes",
        "place.turn",
    }


# The map of the code.

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")

#: By folder, in the order of the page: the modules of its table; "": those outside any folder.
TABLES = {
    folder.partition(" ")[0].strip("`/").removesuffix("top"): re.findall(
        r"^\| `([^`]+)` \| \S", table, re.M
    )
    for folder, table in re.findall(
        r"^\| (top|`\w+/`) \| \|\n\| --- \| --- \|\n((?:\|.*\n)+)", ARCHITECTURE, re.M
    )
}


def _modules_of(folder: str) -> set[str]:
    return {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}


def _folders() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def _layers() -> list[set[str]]:
    """Return the folders and modules that import-linter keeps in order, from above to below."""
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r"^layers = (\[.*?^\])", project, re.M | re.S)
    assert layers is not None
    return [set(re.findall(r"\w+", layer)) for layer in ast.literal_eval(layers[1])]


def test_each_folder_has_a_table() -> None:
    assert set(TABLES) - {""} == _folders()


@pytest.mark.parametrize(
    "folder", sorted({"", *TABLES, *_folders()}), ids=lambda name: name or "top"
)
def test_the_table_of_a_folder_names_its_modules(folder: str) -> None:
    rows = TABLES.get(folder, [])
    _assert_same(set(rows), _modules_of(folder), "architecture")
    assert rows == sorted(set(rows))


def test_the_page_has_the_order_of_folders_that_is_enforced() -> None:
    block = ARCHITECTURE.partition("```\n")[2].partition("```")[0]
    lines = [re.split(r"  +", line)[0] for line in block.splitlines()]
    assert [set(re.findall(r"\w+", line)) for line in lines] == _layers()


def test_tables_of_folders_have_that_order() -> None:
    order = [name for layer in _layers() for name in sorted(layer) if name in TABLES]
    assert [name for name in TABLES if name] == order
