"""The house: imports go downstairs only, heavy packages stay in their rooms, and --help is light."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hetctl import OF_API, OF_SCRIPTS
from hetctl.model.training_settings import FRAMEWORKS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hetctl"

# What each room may import of hetctl, besides itself. A room that is not named belongs to the one around it.
PURE = {"model", "perf"}
PLANNING = PURE | {"scheduling.planners"}
DECIDING = PLANNING | {"scheduling"}
METHODS = {"methods.balance", "methods.hopper", "methods.pipeline", "methods.automl"}
IN_A_JOB = DECIDING | {"storage", "cluster.launchers"}
MAY_IMPORT = {
    "model": set(),
    "storage": {"model"},
    "inputs": {"model", "cluster", "cluster.launchers", "methods.automl"},
    "perf": {"model"},
    "cluster": {"model"},
    "cluster.batch": {"model", "storage", "cluster", "cluster.launchers"},
    "cluster.launchers": {"model", "cluster"},
    "cluster.render": {"model", "storage", "cluster", "cluster.launchers"},
    "catalog": {"model", "storage"},
    "scheduling.planners": PURE,
    "scheduling": PLANNING,
    "scheduling.simulate": DECIDING,
    "methods.balance": {"model"},
    "methods.hopper": {"model", "scheduling"},
    "methods.pipeline": {"model", "scheduling.planners"},
    "methods.automl": {"model"},
    "methods": DECIDING | METHODS | {"scheduling.simulate"},
    "runtime": IN_A_JOB | METHODS,
    "reports": {"model"},
    "app": IN_A_JOB
    | METHODS
    | {
        "scheduling.simulate",
        "methods",
        "inputs",
        "cluster",
        "cluster.batch",
        "cluster.render",
        "catalog",
        "runtime",
    },
    "cli": {"model", "app", "reports", "inputs"},
    "adapters": set(),
    "examples": {"adapters"},
}
BESIDE = ""
MAY_IMPORT_IN = MAY_IMPORT | {BESIDE: {"model", "inputs", "runtime", "app", "cli"}}
"""The same with the modules beside the packages, which users' code imports or starts."""
ONLY_IN = {
    "sqlalchemy": {"catalog"},
    "alembic": {"catalog"},
    "submitit": {"cluster.batch"},
    "click": {"cli"},
    "rich": {"cli", "reports"},
    "matplotlib": {"reports"},
    "jinja2": {"cluster.render", "reports"},
    "pydantic": {"inputs"},
    "yaml": {"inputs"},
    "tensorflow": {"runtime"},
    "keras": {"runtime", "adapters", "examples", BESIDE},
    "torch": {"runtime", "adapters", "examples", BESIDE},
    "lightning": {"adapters", "examples"},
    "transformers": {"adapters", "examples"},
    "hydra": {"examples"},
    "horovod": {"runtime"},
    "mpi4py": {"runtime"},
    "optuna": {"methods.automl"},
    "mlflow": {"app"},
    "wandb": {"app"},
    "cryptography": {"runtime"},
}


def room_of(parts):
    """Return the innermost room that a module, or a package, lies in."""
    named = [".".join(parts[:depth]) for depth in (2, 1)]
    return next((name for name in named if name in MAY_IMPORT), BESIDE)


def modules():
    return sorted(path for path in PACKAGE.glob("**/*.py") if "versions" not in path.parts)


@pytest.fixture(scope="module")
def nodes():
    """The nodes of the syntax tree of each module, the tree first."""
    return {path: nodes_in(path.read_text()) for path in modules()}


def nodes_in(code):
    return list(ast.walk(ast.parse(code)))


def imported_by(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_a_module_imports_only_what_its_room_may(nodes):
    wrong = [
        f"{path} imports {name}"
        for path, those in nodes.items()
        for name in imported_by(those)
        if not _may_import(room_of(path.relative_to(PACKAGE).with_suffix("").parts), *name.split("."))
    ]
    assert wrong == []


def _may_import(room, top, *rest):
    if top == "hetctl" and rest:
        return room_of(rest) in MAY_IMPORT_IN[room] | {room}
    return room in ONLY_IN.get(top, {room})


def test_every_package_has_its_rule():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {room.split(".")[0] for room in MAY_IMPORT}


def test_no_package_hides_a_function_for_scripts():
    """An imported module is an attribute of ``hetctl``, in the place of a function of its name."""
    imported_ones = [path for path in PACKAGE.iterdir() if path.suffix or (path / "__init__.py").exists()]
    assert not (OF_SCRIPTS | OF_API) & {path.stem for path in imported_ones}


def test_the_model_imports_the_standard_library_alone(nodes):
    for path in (PACKAGE / "model").glob("*.py"):
        tops = {name.split(".")[0] for name in imported_by(nodes[path])} - {"hetctl"}
        assert tops <= sys.stdlib_module_names, path


LOADED = """
import sys
from hetctl.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


def loaded_by(*arguments):
    code = LOADED.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_nothing_heavy():
    heavy = {
        "sqlalchemy",
        "pydantic",
        "matplotlib",
        "numpy",
        "scipy",
        "submitit",
        "tensorflow",
        "torch",
        "rich",
        "jinja2",
    }
    assert not heavy & loaded_by("--help")
    assert not heavy & loaded_by("plan", "--help")


def test_sites_are_listed_without_the_catalog():
    assert "sqlalchemy" not in loaded_by("sites")


def loaded_with(modules):
    code = f"import {modules}, sys; print(*sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_driver_does_without_what_takes_long_to_import():
    """NumPy is a third of the time in which a driver starts, and its BLAS starts threads that spin.

    Certificates are for jobs on several nodes.
    """
    assert not {"numpy", "ssl", "cryptography"} & set(loaded_with("hetctl.runtime.driver.driver"))


def test_data_parallel_runs_import_no_other_method():
    """What `plan`, `submit`, `advance` and `status` import before they know the modes of a run."""
    loaded = loaded_with("hetctl.app.plan.planning, hetctl.app.run.lifecycle, hetctl.app.run.status")
    rooms = tuple(
        f"hetctl.{room}." for room in ("methods.hopper", "methods.balance", "runtime", "app.profile.jobs")
    )
    assert [name for name in loaded if f"{name}.".startswith(rooms)] == []


def test_trainers_import_nothing_of_the_login_side():
    code = "import hetctl.runtime.driver, hetctl.runtime.worker.training, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"click", "sqlalchemy", "rich", "tensorflow", "torch", "mpi4py"} & set(done.stdout.split())


def test_the_driver_alone_imports_what_is_the_drivers(nodes):
    """Agents and ranks know it by messages and files."""
    others = [path for path in (PACKAGE / "runtime").rglob("*.py") if "driver" not in path.parts]
    assert len(others) > 50
    names = [(path, name) for path in others for name in imported_by(nodes[path])]
    assert [one for one in names if f"{one[1]}.".startswith("hetctl.runtime.driver.")] == []


PICKLERS = (
    r"(c?pickle|_pickle|cloudpickle|dill|joblib|marshal|shelve|submitit|multiprocessing|mpi4py)(\.|$)"
    r"|concurrent\.futures\.process|torch\.distributed\.checkpoint"
)
"""Modules that run what the pickles say that they read."""
UNPICKLES = {
    "load": lambda call: "torch." in ast.unparse(call.func) and _given(call, "weights_only") is not True,
    "FileSystemReader": lambda _: True,
    "ProcessPoolExecutor": lambda _: True,
    **dict.fromkeys(
        ("allgather_object", "all_gather_object", "broadcast_object", "broadcast_object_list"), lambda _: True
    ),
    **dict.fromkeys(("gather_object", "scatter_object_list", "send_object_list"), lambda _: True),
}
"""Functions that read pickles, and whether a call of the name does."""
LOWER_CASE = {"allgather", "allreduce", "bcast", "gather", "irecv", "isend", "recv", "scatter", "sendrecv"}
"""Methods of mpi4py that pickle; those in capitals send arrays."""
OWN_PROCESSES = "pipes to processes that it has forked itself"
MAY_UNPICKLE = {
    "cluster/batch/submitit_executor.py": "submitit, which pickles nothing for it",
    "runtime/data/preprocessors.py": OWN_PROCESSES,
    "runtime/worker/measuring/measure_preprocessing.py": OWN_PROCESSES,
    "runtime/worker/background_training.py": OWN_PROCESSES,
    "runtime/data/node_exchange.py": "mpi4py for arrays alone",
    "runtime/driver/probe.py": "mpi4py for the number of ranks alone",
    "runtime/frameworks/torch_sharded.py": "metadata of PyTorch's checkpoints, of a list of classes alone",
}


def _given(call, name):
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return ast.literal_eval(values[0]) if values else None


def picklers(nodes):
    """Yield the names in a module by which it may read pickles."""
    yield from (name for name in imported_by(nodes) if re.match(PICKLERS, name))
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if (name in UNPICKLES and UNPICKLES[name](node)) or _given(node, "allow_pickle"):
                yield ast.unparse(node.func)


def test_pickles_are_read_only_where_nobody_else_writes(nodes):
    """Whoever writes a pickle that another process reads runs programs in it."""
    found = {str(path.relative_to(PACKAGE)) for path, those in nodes.items() if list(picklers(those))}
    assert found == MAY_UNPICKLE.keys()
    with_mpi = [PACKAGE / name for name, reason in MAY_UNPICKLE.items() if reason.startswith("mpi4py")]
    calls = [
        (path.name, node.func.attr)
        for path in with_mpi
        for node in nodes[path]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert [call for call in calls if call[1] in LOWER_CASE] == []


def test_a_module_that_reads_pickles_is_found():
    for code in (
        "import pickle",
        "from multiprocessing.connection import Client",
        "import torch\ntorch.load('file')",
        "import numpy as np\nnp.load('file', allow_pickle=True)",
        "import torch.distributed as dist\ndist.gather_object(1)",
    ):
        assert list(picklers(nodes_in(code))), code


SUITES = {"contract", "fuzz", "golden"}
"""Last words of the names of suites that run over all modules, or entries, of a room."""


APART = {"replays", "slurm", "slurm-docker"}
"""Folders of tests of what only replays use, and of those on real clusters; CONTRIBUTING names them."""


def test_tests_lie_as_the_package_does():
    """Files of tests are named for a module, perhaps with a topic, are suites, or lie in `integration`."""
    tests = ROOT / "tests"
    files = [path for path in tests.glob("*/**/test_*.py") if path.relative_to(tests).parts[0] not in APART]
    assert len(files) > 200
    for path in files:
        folder = path.parent.relative_to(tests)
        over_several = folder.name == "integration"
        room = folder.parent if over_several else folder
        assert (PACKAGE / room / "__init__.py").exists(), path
        assert path.stem.startswith(f"test_{room.name}_"), path
        subject = path.stem.removeprefix(f"test_{room.name}_")
        assert over_several or _names_a_module(subject, PACKAGE / room) or subject.split("_")[-1] in SUITES, (
            path
        )


def _names_a_module(subject, room):
    names = {path.stem for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return any(subject == name or subject.startswith(f"{name}_") for name in names)


IN_SECONDS = re.compile(
    r"^(?P<names>\w[\w, ]*) : (?:float|(?:tuple|mapping of \w+) (?:of|to) float)(?: or None)?\n"
    r"(?P<meaning>(?:    .*\n?)+)",
    re.MULTILINE,
)
"""Parameters in a docstring that are numbers, or hold numbers, with what is said of them."""
NO_DURATION = re.compile("since the epoch|clock|relative|GPU-seconds")
HELD_BY_CONTRACT = {"plan_seconds"}


def test_durations_are_named_with_their_unit(nodes):
    """Fields of values are keys of JSON, of events and of the catalog."""
    found = [
        (node.name, match["names"].split(", "))
        for those in nodes.values()
        for node in those
        if isinstance(node, ast.ClassDef)
        for match in IN_SECONDS.finditer(ast.get_docstring(node) or "")
        if re.search(r"\bseconds\b", match["meaning"], re.IGNORECASE)
        and not NO_DURATION.search(match["meaning"])
    ]
    assert len(found) > 100
    assert [(name, names) for name, names in found if not any(_has_unit(one) for one in names)] == []


def _has_unit(name):
    return re.search(r"_s$|_s_per_|_s_by_|^seconds$", name) is not None or name in HELD_BY_CONTRACT


PATCHED_WAIT = re.compile(
    r"""(?:setattr|patch(?:\.object)?)\([^()]*(?:[A-Z]_S|DUTY|\b(?:time|monotonic|perf_counter|sleep))['"]"""
    r"""|\w\.(?:[A-Z_]+_S|DUTY)\s*=[^=]|\btime\.(?:time|monotonic|perf_counter|sleep)\s*=[^=]""",
)
VIRTUAL_TIME = {"virtual_job.py"}
"""Modules that run a whole driver in virtual time: each clock in it is the virtual one."""


def test_waits_and_clocks_are_injected_and_not_patched():
    """Neither by a fixture nor by an assignment, also in the programs that tests write."""
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    patched = [(path.name, found) for path, text in texts.items() for found in PATCHED_WAIT.findall(text)]
    assert len(texts) > 200
    assert {name for name, _ in patched} == VIRTUAL_TIME


USED_BY_OTHERS = {
    ("hetctl.api", "plan"): "for users' code",
    ("hetctl.api", "submit"): "for users' code",
    ("hetctl.examples.digits.digits", "input_fn"): "named in the example's ensemble file",
    ("hetctl.examples.digits.digits", "model_fn"): "named in the example's ensemble file",
    ("hetctl.examples.digits-pytorch.digits", "input_fn"): "named in the example's ensemble file",
    ("hetctl.examples.digits-pytorch.digits", "model_fn"): "named in the example's ensemble file",
    ("hetctl.runtime.frameworks.exported_ensemble", "predict_fn"): "for users' code, in exported folders",
    ("hetctl.images", "ImageFolder"): "for users' code",
    ("hetctl.images", "in_turn"): "for users' code",
    ("hetctl.images", "random_crop_and_flip"): "for users' code",
    ("hetctl.images", "scale"): "for users' code",
    ("hetctl.script", "last_checkpoint"): "for users' code",
}
"""Names that no code of hetctl uses, each with the reason."""
NAMED_IN_A_TABLE = re.compile(r"(hetctl(?:\.\w+)+):(\w+)")


def test_every_name_of_a_module_is_used_or_has_a_reason(nodes):
    """Used by its own module outside of its definition, by another one, or by a table of names."""
    trees = {_dotted(path): those[0] for path, those in nodes.items()}
    used = {name for those in nodes.values() for name in _used_of_others(those, trees.keys())}
    used |= {(entry.module, "FRAMEWORK") for entry in FRAMEWORKS.values()}
    names = [(module, *one) for module, tree in trees.items() for one in _defined_in(tree)]
    assert len(names) > 3000
    readers = {module: _readers_in(tree) for module, tree in trees.items()}
    unused = {
        (module, name)
        for module, name, definition in names
        if (module, name) not in used
        and all(reader is definition for reader in readers[module].get(name, ()))
    }
    assert unused == USED_BY_OTHERS.keys()


def _dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _defined_in(tree):
    """Yield the names of functions, classes and constants with their definitions, without commands."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            is_command = any(re.search(r"\bcommand\(", ast.unparse(one)) for one in node.decorator_list)
            if not is_command and not node.name.startswith("__"):
                yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            yield from ((name, node) for name in found if not name.startswith("__"))


def _used_of_others(nodes, known):
    """Yield module and name of what a module imports, takes from imported modules, or names in a table."""
    own = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
            dotted = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            own |= {name: module for name, module in dotted.items() if module in known}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from NAMED_IN_A_TABLE.findall(node.value)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            yield own[node.value.id], node.attr


def _readers_in(tree):
    """Return for each name the statements of a module that read it."""
    readers = defaultdict(list)
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                readers[node.id].append(statement)
    return readers
