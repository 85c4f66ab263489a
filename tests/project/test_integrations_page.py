"""The page on frameworks names the versions that are tested, and an example of each."""

from __future__ import annotations

import re

from repository import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text()
TRIED = dict(
    re.findall(
        r"^([\w-]+)\S*==(\S+)$",
        (ROOT / "tests" / "integrations" / "requirements.txt").read_text(),
        re.M,
    )
)
#: Names of packages, where the page has another.
NAMES = {"ray": "Ray Train", "torchft-nightly": "torchft"}
#: The same releases as those of lightning, and what logs are written with.
NOT_IN_TABLE = {"pytorch-lightning", "tensorboard", "wandb"}


def test_versions() -> None:
    rows = re.findall(r"^\| (\w[\w ]*)(?:, \S+)? \| (\d\S*) \|", PAGE, re.M)
    named = {name.lower(): version for name, version in rows}
    tried = {
        NAMES.get(package, package).lower(): version
        for package, version in TRIED.items()
        if package not in NOT_IN_TABLE
    }
    assert named == tried
    assert TRIED["pytorch-lightning"] == TRIED["lightning"]


#: Of no framework.
OTHER_EXAMPLES = {"trace_training.py", "profile_training.py"}


def test_every_example_is_named() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*_training.*")}
    assert scripts - OTHER_EXAMPLES == set(re.findall(r"examples/(\w+\.\w+)", PAGE))
