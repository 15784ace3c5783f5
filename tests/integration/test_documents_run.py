"""What the README and the pages of `docs/` tell a reader to type runs as it is written.

The Python blocks of a page share one namespace, in their order. They take for granted what the README's first block
defines, and what `GIVEN` says. On the pages in `APART` each block is a program by itself. A value in a comment behind
`print(...)` is what must be printed. Flows run on simulated devices, except where a block names others.

Of console blocks, commands of `prefect-gpu` and cheap ones of Prefect run; of others it is checked that what they
name exists. The quick start runs as a whole in `tests/install`. Files of other kinds are parsed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from prefect_gpu.cli.commands import main
from tests.integration.documents import (
    PAGES,
    TEXT,
    Block,
    Command,
    at_their_lines,
    blocks,
    commands,
    problem,
    runs,
)
from tests.integration.programs import REPOSITORY, Workplace, workplace

BLOCKS = [block for page in PAGES for block in blocks(page)]

#: Pages whose blocks are programs of their own.
APART = ["docs/migrating.md"]

#: These run in `make test`, all others in `make check`.
QUICK = ["README.md"]

#: By page: what its blocks take for granted.
GIVEN = {
    "docs/memory.md": """
from types import SimpleNamespace

import torch


class Model(torch.nn.Linear):
    def forward(self, batch):
        return SimpleNamespace(loss=super().forward(batch).square().mean())


model, loader = Model(4, 2), torch.randn(3, 8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
}

#: By page: calls of what its blocks define.
CALLS = {"README.md": 'print(evaluate_all(["a", "b"]), rehearsal())  # [None, None] None\n'}

#: What the samples of `docs/migrating.md` import.
MY_PROJECT = """
BATCHES = [[1, 2], [3, 4], [5, 6], [7, 8]]
_options = {"speed": "default"}


class Model:
    def __init__(self, name):
        self.name, self.steps = name, 0

    def to(self, device):
        return self

    def score(self, batch):
        return len(self.name) * sum(batch)

    def train(self, data):
        self.steps += len(data)


def load_model(name):
    return Model(name)


def option():
    return _options["speed"]


def set_option(speed):
    _options["speed"] = speed
"""


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        made.environment["PREFECT_INTEGRATIONS_GPU_DEVICES"] = "simulated:1x24GiB"
        made.write("my_project.py", MY_PROJECT)
        yield made


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and runs(block)]


def programs() -> list[object]:
    """Return lists of blocks that run together."""
    made: dict[str, list[Block]] = {}
    for block in of("python"):
        made.setdefault(str(block) if block.page in APART else block.page, []).append(block)
    return [
        pytest.param(parts, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, parts in made.items()
    ]


def run_program(place: Workplace, parts: list[Block]) -> None:
    page = parts[0].page
    taken = "" if page == "README.md" or page in APART else of("python")[0].code
    place.write("given.py", taken + GIVEN.get(page, ""))
    text = at_their_lines(parts, first="from given import *") + CALLS.get(page, "")
    place.write(f"{Path(page).stem}.py", text)
    printed = place.run(f"{Path(page).stem}.py").stdout.splitlines()
    wanted = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert [line for line in printed if line in wanted] == wanted


@pytest.mark.parametrize("parts", programs())
def test_python_blocks_run(place: Workplace, parts: list[Block]) -> None:
    run_program(place, parts)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_or_says_why_it_does_not(block: Block) -> None:
    assert (wrong := problem(block)) is None, wrong
    known = ("python", "console", *TEXT, *FILES)
    assert not runs(block) or block.language in known, f"{block}: nothing checks {block.language}"
    if block.language == "python":
        compile(block.code, str(block), "exec")


# -- console -----------------------------------------------------------------------------------


def console_blocks() -> list[object]:
    quick = {"cat", "make", "prefect-gpu"}  # a command of Prefect takes 5 s
    return [
        pytest.param(
            block,
            id=str(block),
            marks=() if {c.words[0] for c in commands(block)} <= quick else pytest.mark.slow,
        )
        for block in of("console")
    ]


@pytest.mark.parametrize("block", console_blocks())
def test_console_blocks_run(place: Workplace, block: Block) -> None:
    for command in commands(block):
        check_command(place, block, command)


def check_command(place: Workplace, block: Block, command: Command) -> None:
    """Run a command, or check that what it names exists."""
    name, *rest = command.words
    unfit = f"{block}: `{' '.join(command.words)}` "
    if name == "cat":
        place.write(rest[0], command.output)
    elif name == "pip":
        check_requirements(rest[1:], unfit)
    elif name == "make":
        assert re.search(rf"^{rest[0]}:", (REPOSITORY / "Makefile").read_text(), re.M), unfit
    elif name == "python" and rest[0].startswith(("flows/", "benchmarks/")):
        assert (REPOSITORY / rest[0]).is_file(), unfit
    elif name in ("prefect", "prefect-gpu"):
        stays = {"--watch", "--background"} & {*rest} or {"start", "serve"} & {*rest}
        if stays or any(word.isupper() for word in rest):  # `report NAME`
            known = place.run("-m", name.replace("-", "_"), *subcommand(rest), "--help").stdout
            assert all(word in known for word in rest if word.startswith("--")), unfit
        else:
            printed = place.run("-m", name.replace("-", "_"), *rest).stdout
            if rest[0] == "simulate" and command.output:
                assert printed.strip() == command.output.strip()
    else:
        pytest.fail(unfit + "is not run by this test: mark its block with the reason")


def subcommand(words: list[str]) -> list[str]:
    """Return the words before the first option or value."""
    ends = (
        at
        for at, word in enumerate(words)
        if not re.fullmatch(r"[a-z-]*[a-z]", word) or word[0] == "-"
    )
    return words[: next(ends, len(words))]


def check_requirements(words: list[str], unfit: str) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"(?:prefect-gpu|\.)\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", project, re.M), unfit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_documents_name_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    written = re.findall(r"(?:^|[\s`$])prefect-gpu ([a-z]\w*)((?: --[a-z-]+)*)", text, re.MULTILINE)
    for command, options in written:
        assert main([command, "--help"]) == 0, f"{page.name}: prefect-gpu {command}"
        shown = capsys.readouterr().out
        assert all(option in shown for option in options.split()), f"{command}{options}"
    for script in re.findall(r"python ((?:flows|benchmarks)/\w+\.py)", text):
        assert (REPOSITORY / script).is_file(), f"{page.name}: {script}"


# -- files of other programs -------------------------------------------------------------------


def check_yaml(text: str) -> None:
    for document in yaml.safe_load_all(text):
        assert isinstance(document, dict)
        if "apiVersion" in document:
            assert document["kind"] and document["metadata"]["name"]


def check_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Slurm reads options above the first command, and ignores those below.
    rest = re.sub(r"\A(?:#.*\n|\s*\n)*", "", text)
    assert "#SBATCH" not in rest
    for options in re.findall("#SBATCH(.*)", text):
        assert re.fullmatch(r"(\s+--?[a-z][\w-]*(=\S+)?)+", options), options


INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def check_dockerfile(text: str) -> None:
    lines = re.sub(r"\\\n|^#.*\n", "", text, flags=re.M).split("\n")
    words = [line.split()[0] for line in lines if line.strip()]
    assert words[0] in ("FROM", "ARG") and "FROM" in words
    assert {*words} <= INSTRUCTIONS


#: By the language of a block.
FILES: dict[str, Callable[[str], None]] = {
    "yaml": check_yaml,
    "bash": check_bash,
    "dockerfile": check_dockerfile,
}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in FILES], ids=str)
def test_files_of_other_programs_are_well_formed(block: Block) -> None:
    FILES[block.language](block.code)
