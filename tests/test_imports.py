"""Count the modules that imports load; milliseconds would depend on the machine."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest

from tests import programs

ROOT = Path(__file__).parents[1]
CLOUD = {"aiohttp", "google", "grpc", "kubernetes", "kubernetes_asyncio", "requests", "urllib3"}
HEAVY = {"IPython", "hypothesis", "jax", "keras", "numpy", "pytest", "rich", "sklearn", "torch"}
HEAVY |= {"cryptography", "gcloud", "google_crc32c", "jwt", "tenacity"}

LOADED = """
import json, sys
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(code: str, *path: Path) -> set[str]:
    """Return the modules that *code* loads in a fresh interpreter with *path* and the libraries."""
    setup = f"import sys; sys.path[:0] = {[str(folder) for folder in path]}"
    program = f"{setup}\n{LOADED.format(code=code)}"
    return set(json.loads(programs.python("-I", "-W", "error", "-c", program)))


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_import_kinetic_loads_exactly_one_module() -> None:
    assert loaded_by("import kinetic", ROOT) == {"kinetic"}


def test_importing_aio_loads_its_names_without_the_client() -> None:
    loaded = loaded_by("import kinetic.aio, typing", ROOT) - loaded_by("import typing", ROOT)
    own = ours(loaded)
    assert own == {"kinetic"} | {name for name in own if ".aio" in name}
    assert len(own) <= 6 and "kinetic.aio.client" not in own


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("kinetic")}


CLIENT = "import kinetic.aio; client = kinetic.aio.Client(backend='local')"

CALL = f"""
import asyncio
{CLIENT}
async def call():
    async with client:
        assert await client.run(abs, -3) == 3
asyncio.run(call())
"""

UNUSED_BY_ONE_CALL = {
    *("kinetic._collector", "kinetic._progress.display", "kinetic._report", "kinetic.aio.batch"),
    *("kinetic.aio._engine.batch", "kinetic.aio._engine.batches", "kinetic.aio._engine.workers"),
    *("kinetic.aio._engine.coordinator", "kinetic.aio._engine.decisions"),
    *("kinetic.aio._engine.input_pump", "kinetic.aio._submissions.inputs"),
    *("kinetic.aio._preparing.inputs", "kinetic.aio._preparing.data_upload"),
    *("kinetic.aio._debugging.attaching", "kinetic.aio._debugging.forwarder"),
    *("kinetic.aio._reading.iteration", "kinetic.aio._reading.progress"),
    *("kinetic.aio._reading.listing", "kinetic._supervisor.jobs", "html"),
}


def test_a_client_loads_no_engine_before_its_first_operation() -> None:
    loaded = ours(loaded_by(CLIENT, ROOT))
    engine = re.compile(r"kinetic\.aio\._(debugging|engine|preparing|reading|submissions)\.")
    assert [*filter(engine.match, loaded)] == ["kinetic.aio._engine.in_flight"]
    assert not any(name.startswith(("kinetic._packing", "kinetic._runner.job")) for name in loaded)
    assert len(loaded) <= 26


def test_a_first_local_call_loads_no_module_for_batches_debuggers_or_lists() -> None:
    loaded = loaded_by(CALL, ROOT)
    assert loaded & UNUSED_BY_ONE_CALL == set()
    assert top_level(loaded) & (CLOUD | HEAVY) == set()
    assert len(ours(loaded)) <= 99


def test_the_help_of_the_command_loads_click_and_the_commands_alone() -> None:
    loaded = loaded_by("import kinetic.cli.app", ROOT) - loaded_by("import click", ROOT)
    assert len(ours(loaded)) <= 17
    assert loaded.isdisjoint({"asyncio", "csv", "dataclasses", "json", "pathlib", "rich"})


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make a folder of packages with kinetic as pip installs it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kinetic", tmp_path / "kinetic", ignore=ignored)
    return tmp_path


def stderr_of(code: str, site: Path) -> list[str]:
    """Run *code* in an interpreter that has *site*; return the lines on standard error."""
    setup = f"import sys; sys.path.insert(0, {str(site)!r})"
    completed = programs.run(sys.executable, "-I", "-c", f"{setup}\n{code}")
    assert completed.returncode == 0, completed.stderr
    return completed.stderr.splitlines()


def test_keras_kinetic_in_the_same_folder_causes_one_warning_with_the_fix(site: Path) -> None:
    (site / "keras_kinetic-0.0.4.dist-info").mkdir()
    (site / "kinetic" / "core").mkdir()
    (site / "kinetic" / "core" / "core.py").touch()
    code = "import kinetic; kinetic.run; import kinetic.aio; kinetic.aio.Client"
    (warning,) = [line for line in stderr_of(code, site) if "Warning" in line]
    assert "pip uninstall -y keras-kinetic kinetic-aio; pip install kinetic-aio" in warning
    assert str(site / "kinetic") in warning


def test_keras_kinetic_in_another_folder_causes_no_warning(site: Path, tmp_path: Path) -> None:
    (tmp_path / "else" / "kinetic" / "core").mkdir(parents=True)
    (tmp_path / "else" / "kinetic" / "core" / "core.py").touch()
    (tmp_path / "else" / "keras_kinetic-0.0.4.dist-info").mkdir()
    code = f"sys.path.append({str(tmp_path / 'else')!r}); import kinetic; kinetic.run"
    assert stderr_of(code, site) == []


def test_basic_use_loads_nothing_heavy() -> None:
    """A module that one of these lines loads stays loaded, so one program shows them all."""
    code = "import kinetic; kinetic.submit; kinetic.run(accelerator='cpu')(lambda: None)"
    loaded = loaded_by(f"{code}; kinetic.run(backend='local')(abs)(-3)", ROOT)
    assert top_level(loaded) & (CLOUD | HEAVY) == set()


def test_all_public_names_can_be_loaded() -> None:
    loaded_by("import kinetic; [getattr(kinetic, name) for name in kinetic.__all__]", ROOT)
    loaded_by("import kinetic.aio as aio; [getattr(aio, name) for name in aio.__all__]", ROOT)


def test_importing_everything_leaves_logging_alone() -> None:
    code = """
import logging, pkgutil
root = logging.getLogger()
handlers, level = list(root.handlers), root.level
import kinetic
for module in pkgutil.walk_packages(kinetic.__path__, "kinetic."):
    if not module.name.rpartition(".")[2] in ("__main__", "remote_runner"):
        __import__(module.name)
from absl import logging as absl_logging
assert (root.handlers, root.level) == (handlers, level), (root.handlers, root.level)
"""
    assert top_level(loaded_by(code, ROOT)) & CLOUD == set()


def test_the_runner_imports_nothing_but_the_standard_library_and_cloudpickle(
    tmp_path: Path,
) -> None:
    shutil.copytree(
        ROOT / "runner", tmp_path / "kinetic_runner", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = """
import pkgutil, kinetic_runner
for module in pkgutil.walk_packages(kinetic_runner.__path__, "kinetic_runner."):
    __import__(module.name)
"""
    loaded = loaded_by(code, tmp_path, Path(cloudpickle.__file__).parents[1])
    foreign = top_level(loaded) - set(sys.stdlib_module_names) - {"kinetic_runner"}
    assert foreign <= {"cloudpickle"}
    assert "kinetic_runner.job.attempt" in loaded
