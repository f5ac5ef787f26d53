"""Computes the package list; everything else is in pyproject.toml.

A hand-written list goes wrong silently: a new sub-package works in an editable install and is missing
from the wheel. Each root folder below is mapped to one import name and searched for its sub-packages.
"""

from setuptools import find_packages, setup

ROOTS = {
    "draftpair": "core",
    "draftpair.convert": "convert",
    "draftpair.validate": "validate",
    "draftpair.runtime": "runtime",
    "draftpair.schemas": "schemas",
}

setup(
    package_dir=ROOTS,
    packages=[
        name
        for root, folder in ROOTS.items()
        for name in (root, *(f"{root}.{sub}" for sub in find_packages(folder)))
    ],
)
