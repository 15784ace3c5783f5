"""The examples in `flows/` run as a user runs them, on devices that any machine has.

`make demo` runs `evaluate_models.py`; `test_profile_training.py` has `profile_training.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
import yaml
from prefect import get_client

from prefect_gpu import report
from tests.integration import engine_api as api
from tests.integration.programs import LIMIT_S, REPOSITORY, Workplace, run_cells

FLOWS = REPOSITORY / "flows"
NOTEBOOK = json.loads((FLOWS / "notebook.ipynb").read_text(encoding="utf-8"))

torch_is_there = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

#: The flow of `evaluate_architectures.py`, in which one architecture is larger than the device.
ONE_TOO_LARGE = """
import sys

sys.path.insert(0, sys.argv[1])
import evaluate_architectures as example
from prefect import task
from prefect_gpu import GPUTaskRunner, report_metric
from prefect_gpu.testing import allocate

SIZES = {"small": "1GiB", "huge": "30GiB"}


@task(task_run_name="{library}/{name}")
def measure(library, name, batch, small):
    with allocate(SIZES[name]):
        report_metric("images_per_s", 12.5)


example.measure = measure
flow = example.evaluate_architectures.with_options(
    task_runner=GPUTaskRunner(devices="simulated:1x8GiB")
)
print(*example.figures(flow([("timm", "huge"), ("timm", "small")], "2GiB", 1, True)), sep="\\n")
"""


def run_example(place: Workplace, name: str, *arguments: str) -> list[str]:
    return place.run(str(FLOWS / name), *arguments).stdout.splitlines()


def test_each_example_says_how_it_is_run() -> None:
    for file in FLOWS.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        stated = ast.get_docstring(ast.parse(text)) or ""
        assert f"    python flows/{file.name}" in stated, file.name
        for command in re.findall(rf"^    python flows/{file.name}(.*)", stated, re.MULTILINE):
            for option in re.findall(r"--[a-z-]+", command):
                assert f'"{option}"' in text, f"{file.name}: {option}"


@torch_is_there
@pytest.mark.slow
def test_architectures_are_measured_and_a_missing_library_is_said(place: Workplace) -> None:
    lines = run_example(
        place, "evaluate_architectures.py", "--small", "--devices=simulated:1x8GiB", "--memory=2GiB"
    )
    libraries = ("timm", "torchvision", "transformers")
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    said = [line for line in lines if line.startswith("not installed, left out: ")]
    assert said == ([f"not installed, left out: {', '.join(missing)}"] if missing else [])
    (measured,) = (line for line in lines if line.startswith("torch/transformer-encoder"))
    assert re.search(r" [\d,]+\.\d tokens a second, at most \S+ of simulated", measured)


@pytest.mark.slow
def test_an_architecture_that_runs_out_of_memory_does_not_end_the_flow(place: Workplace) -> None:
    program = place.write("one_too_large.py", ONE_TOO_LARGE)
    lines = place.run(str(program), str(FLOWS)).stdout.splitlines()
    huge = [line for line in lines if line.startswith("timm/huge")]
    assert huge and all(" oom, at most " in line for line in huge)
    (small,) = (line for line in lines if line.startswith("timm/small"))
    assert "12.5 images a second, at most 1GiB of simulated" in small


@torch_is_there
@pytest.mark.slow
def test_a_sweep_learns_its_budgets_and_prints_the_best(place: Workplace) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    few = ["--widths", "16", "--rates", "0.01", "0.0001", "--dropouts", "0.0", "--epochs", "1"]
    # Both are first runs, side by side.
    run_example(place, "sweep.py", "--devices=host", *few)
    lines = run_example(place, "sweep.py", "--devices=host", *few)
    rows = [line for line in lines if line.startswith("width 16, ")]
    accuracies = [float(re.findall(r"accuracy ([\d.]+)", row)[0]) for row in rows]
    assert len(rows) == 2 and accuracies == sorted(accuracies, reverse=True)
    budgets = {re.findall(r"budget ([\d.]+)(\w+)", row)[0] for row in rows}
    # What the first runs were measured to need.
    assert {unit for _, unit in budgets} == {"MiB"}
    assert lines[-1] == "best: " + ", ".join(rows[0].split(", ")[:3])


@pytest.mark.slow
def test_the_largest_batch_of_a_budget(place: Workplace) -> None:
    lines = run_example(
        place,
        "find_batch_size.py",
        *("--memory", "2GiB", "--start", "256", "--devices", "simulated:1x8GiB"),
    )
    # 64 images would take 2,220 MiB.
    assert "largest batch of 256, its half, and so on, in 2GiB: 32" in lines
    assert any(line.startswith("trained with it in <Allocation: budget 2GiB;") for line in lines)


# -- the notebook ------------------------------------------------------------------------------


def test_the_notebook_has_no_output_and_no_path() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len({*ids}) == len(ids)
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    assert not re.search(r"/(home|root|tmp|work|Users)\b", json.dumps(NOTEBOOK))


@torch_is_there
@pytest.mark.slow
def test_the_notebook_runs_to_its_report(place: Workplace) -> None:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    cells = ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]
    assert cells[-1].startswith("report(")
    shown = (
        "page = _._repr_html_()\nprint(*(n in page for n in ('train-16', 'train-64', 'train-128')))"
    )
    printed = run_cells(place, [*cells, shown])
    assert printed[-1].strip() == "True True True"


# -- deployments -------------------------------------------------------------------------------


def deploy(place: Workplace, pool: str) -> UUID:
    """Deploy the example as its docstring says, ask for a flow run, and return its id."""
    prefect = ("-m", "prefect", "--no-prompt")
    place.run(*prefect, "work-pool", "create", pool, "--type", "process")
    place.run(str(FLOWS / "deployment.py"), "--pool", pool)
    asked = place.run(*prefect, "deployment", "run", "nightly/gpu", "--param", "sizes=[64, 128]")
    return UUID(re.findall(r"UUID: (\S+)", asked.stdout)[0])


def assert_it_ran(flow_run_id: UUID) -> None:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    assert state is not None and state.is_completed(), state
    api.artifacts(flow_run_id=flow_run_id, count=3)
    processes = report(str(flow_run_id)).processes
    assert {each.task_run for each in processes} == {"multiply-64", "multiply-128"}
    assert {each.figures["source"] for each in processes} == {"simulated"}


@torch_is_there
@pytest.mark.slow
def test_a_process_worker_runs_the_deployment(place: Workplace) -> None:
    place.environment["PREFECT_INTEGRATIONS_GPU_DEVICES"] = "simulated:1x8GiB"
    flow_run_id = deploy(place, "pool-of-the-example")
    worker = ("worker", "start", "--pool", "pool-of-the-example", "--limit", "2", "--run-once")
    place.run("-m", "prefect", "--no-prompt", *worker)
    assert_it_ran(flow_run_id)


@torch_is_there
@pytest.mark.slow
def test_the_entry_script_of_the_container_in_a_namespace_of_its_own(place: Workplace) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--mount"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no new pid and mount namespace: {getattr(error, 'stderr', '') or error}")
    flow_run_id = deploy(place, "gpu-pool")
    # As in a container: a small /dev/shm, folders of its own, the worker as process 1.
    inside = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {FLOWS}/docker/entry.sh --run-once"
    bin_folder = Path(sys.executable).parent
    environment = place.environment | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PREFECT_HOME": str(place.folder / "container" / "prefect"),
        "PREFECT_INTEGRATIONS_GPU_LEDGER": str(place.folder / "container" / "ledger"),
        "PREFECT_INTEGRATIONS_GPU_DEVICES": "simulated:1x8GiB@container",
    }
    done = subprocess.run(
        [*unshare, "bash", "-c", inside],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/dev/shm holds 64 MiB; DataLoaders with workers need more" in done.stderr
    assert (place.folder / "container" / "ledger" / "ledger.db").is_file()
    assert_it_ran(flow_run_id)


def test_the_entry_script_asks_for_the_server(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PREFECT_HOME": str(tmp_path)}
    script = str(FLOWS / "docker" / "entry.sh")
    done = subprocess.run([script], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "set PREFECT_API_URL to the API of a Prefect server" in done.stderr


# -- files that are not run --------------------------------------------------------------------


def block(page: str, language: str, number: int = 0) -> str:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found[number]


@pytest.mark.parametrize("page", ["docker.md", "deployments.md"])
def test_a_page_says_that_its_files_were_not_run(page: str) -> None:
    assert "not run" in re.sub(r"<!--.*?-->", "", (REPOSITORY / "docs" / page).read_text())


def test_the_compose_file_has_what_the_page_asks_for() -> None:
    compose = yaml.safe_load(block("docker.md", "yaml"))
    worker = compose["services"]["worker"]
    assert (REPOSITORY / worker["build"]["dockerfile"]).is_file()
    assert worker["shm_size"] == "8gb" and worker["pid"] == "host"
    assert "PREFECT_API_URL" in worker["environment"]
    (volume,) = worker["volumes"]
    assert volume.split(":")[0] in compose["volumes"] and volume.endswith(":/ledger")
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_the_kubernetes_deployment_has_what_the_page_asks_for() -> None:
    deployment = yaml.safe_load(block("docker.md", "yaml", 1))
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    spec = deployment["spec"]
    template = spec["template"]
    assert spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
    assert {each["name"] for each in container["env"]} == {"PREFECT_API_URL"}
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert {*mounts} == {"/dev/shm", "/ledger"}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_the_slurm_file_is_well_formed() -> None:
    script = block("deployments.md", "bash")
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, _, rest = script.partition("export ")
    options = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", head, re.MULTILINE)
    assert len(options) == head.count("#SBATCH") > 0 and "#SBATCH" not in rest
    assert "gpus-per-node" in options
    # Of the batch shell itself: `exec` makes that the worker.
    assert "#SBATCH --signal=B:TERM@" in head and rest.splitlines()[-1].startswith(
        "exec prefect worker start"
    )


def test_the_image_copies_what_there_is() -> None:
    lines = (FLOWS / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = (word for word in line.split()[1:] if not word.startswith("--"))
            assert all((REPOSITORY / source).exists() for source in sources), line
    (entry,) = (json.loads(line[11:]) for line in lines if line.startswith("ENTRYPOINT "))
    assert entry == ["tini", "--", "entry.sh"]
    assert os.access(FLOWS / "docker" / "entry.sh", os.X_OK)


@pytest.mark.parametrize("name", ["evaluate_models.py", "sweep.py"])
def test_an_example_says_what_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setitem(sys.modules, "sklearn", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.syspath_prepend(str(FLOWS))
    words = r'not installed: sklearn; the examples need pip install "\.\[examples\]"'
    with pytest.raises(SystemExit, match=words):
        runpy.run_path(str(FLOWS / name), run_name="__main__")
