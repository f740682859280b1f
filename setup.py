"""Packaging of hetctl; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "hetctl/__init__.py").read_text()).group(1)

REPORT = ["matplotlib>=3.8"]
# TensorFlow 2.18 needs protobuf below 6, which 9.13 and later do not take.
SOLVERS = ["ortools>=9.12,<9.13", "scipy>=1.11"]
MPI = ["mpi4py>=4.1,<5"]
HOROVOD = ["horovod==0.28.1"]
TENSORFLOW = ["tensorflow-cpu==2.18.1", "keras>=3.6,<4"]
PYTORCH = ["torch==2.13.0"]
OPTUNA = ["optuna>=5,<6", "cmaes>=0.12"]
MLFLOW = ["mlflow-skinny>=3.1,<4"]
WANDB = ["wandb>=0.20,<0.23"]
DATA = ["h5py>=3.10", "pillow>=10.0", "zarr>=2.18"]
GPU = ["nvidia-ml-py>=12.535"]
ADAPTERS = ["accelerate>=1.10,<2", "hydra-core>=1.3,<2", "lightning>=2.6,<3", "transformers>=5,<6"]
EXAMPLES = ["scikit-learn>=1.4"]
DEVELOPMENT = [
    "build>=1.2",
    "datasets>=4",
    "hypothesis>=6.100",
    "mkdocs-material>=9.5",
    "mypy>=1.13",
    "psutil>=5.9",
    "pytest>=8",
    "pytest-xdist>=3.8",
    "ruff>=0.8",
    "types-PyYAML",
    "webdataset>=1",
]

setup(
    name="hetctl",
    version=VERSION,
    description="Train an ensemble of different neural networks on a Slurm, LSF, PBS or Flux cluster",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["hetctl", "hetctl.*"]),
    # Without it an editable install has a finder, which doubles the time in which any Python starts.
    package_dir={"": "."},
    # hetctl/templates and hetctl/site-configs are links to the folders at the top level.
    package_data={
        "hetctl": [
            *("py.typed", "examples/*/*", "inputs/*.json", "reports/*.j2"),
            *("templates/*.j2", "site-configs/*.yaml"),
        ],
    },
    install_requires=[
        "alembic>=1.13",
        "click>=8.1",
        "cryptography>=42",
        "jinja2>=3.1",
        "numpy>=1.26",
        "pydantic>=2.7",
        "pyyaml>=6.0",
        "rich>=13.7",
        "sqlalchemy>=2.0.30",
        "submitit>=1.5.4",
    ],
    extras_require={
        "report": REPORT,
        "solvers": SOLVERS,
        "tensorflow": TENSORFLOW,
        "pytorch": PYTORCH,
        "horovod": HOROVOD,
        "mpi": MPI,
        "optuna": OPTUNA,
        "mlflow": MLFLOW,
        "wandb": WANDB,
        "data": DATA,
        "gpu": GPU,
        "adapters": ADAPTERS,
        "examples": EXAMPLES,
        "dev": DEVELOPMENT,
    },
    entry_points={
        "console_scripts": ["hetctl = hetctl.cli.main:start"],
    },
    classifiers=[
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: System :: Distributed Computing",
    ],
)
