"""Packages are listed by hand, so that nothing is shipped by accident."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "fastaug/__init__.py").read_text())[1]
# fastaug.export --to onnx: torch's exporter needs the first two, the last one checks the file.
EXPORT = ["onnx", "onnxscript", "onnxruntime"]
# fastaug.sweep; fastaug.figures; fastaug.report. Before 4.9 Optuna names its retries differently.
PAPER = ["optuna>=4.9", "matplotlib", "jinja2"]
# --log wandb, --log mlflow. mlflow-skinny comes without what its local store needs. trackio is not
# here: it needs Pillow below 13.
LOGGERS = ["wandb>=0.31", "mlflow-skinny>=3", "sqlalchemy", "alembic"]
# make docs
DOCS = ["mkdocs", "mkdocs-material"]

setup(
    name="fastaug",
    version=VERSION,
    description="Image classifiers trained through K random views of every image at once",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *("fastaug", "fastaug.engine", "fastaug.runs", "fastaug.runs.loggers"),
        *("fastaug.runtime", "fastaug.data"),
        *("fastaug.data.packing", "fastaug.data.readers", "fastaug.data.remote"),
        *("fastaug.views", "fastaug.kernels", "fastaug.toolchain", "fastaug.models"),
        *("fastaug.exporters", "fastaug.experiments"),
        *("fastaug.diagnostics", "fastaug.diagnostics.gpu_report"),
        # Folders beside fastaug/ in the tree. cuda/ holds sources only, and no __init__.py: with
        # one it would hide NVIDIA's package of that name from whoever starts Python here.
        *("fastaug.pipelines", "fastaug.cuda"),
    ],
    package_dir={"fastaug.pipelines": "pipelines", "fastaug.cuda": "cuda"},
    package_data={
        "fastaug": ["py.typed"],
        "fastaug.cuda": ["*.h", "*.cpp", "*.cu"],
        "fastaug.experiments": ["templates/*"],
        "fastaug.diagnostics.gpu_report": ["templates/*"],
    },
    install_requires=[
        "numpy>=2",
        # 2.4: earlier ones have no fn.filter and fn.equalize. NVIDIA builds it for Linux alone. Its
        # twin for CUDA 13, nvidia-dali-cuda130, takes the same folder: it replaces this one.
        "nvidia-dali-cuda120>=2.4; sys_platform == 'linux'",
        "obstore>=0.12",  # --data s3://, gs://, http(s)://
        "pillow",
        "pyyaml",  # --config; timm needs it, too
        "pyarrow",  # Hugging Face's Parquet and Arrow files
        "rich",
        "safetensors",
        "tensorboard",
        "timm>=1.0",
        "torch>=2.9",
        "torchvision",  # timm needs it
        "tyro>=0.9",
    ],
    extras_require={
        "export": EXPORT,
        "paper": PAPER,
        "docs": DOCS,
        "loggers": LOGGERS,
        "dev": [
            *EXPORT,
            *DOCS,
            *LOGGERS,
            *PAPER,  # matplotlib also draws the plots of benchmarks/
            "build",
            "flask",  # with flask-cors and moto: an S3 server for tests
            "flask-cors",
            "hypothesis",
            "ipykernel",  # with nbclient: runs examples/quickstart.ipynb in a test
            "moto[s3]",
            "mypy",
            "nbclient",
            "nvidia-cuda-nvdisasm; sys_platform == 'linux'",  # tests of the GPU's machine code
            "pre-commit",
            "psutil",  # benchmarks/: CPU time, memory and descriptors
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "scipy",
            "setuptools",
            "wheel",
        ],
    },
    entry_points={"console_scripts": ["fastaug=fastaug.__main__:script"]},
)
