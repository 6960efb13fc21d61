"""The pages for readers: short enough, without dead links, and with code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import herta_gpu
from tests.conftest import ROOT

PAGES = ["README.md", "CHANGELOG.md", "bench/README.md", "tests/README.md", "kernels/README.md"]
PAGES += ["herta_gpu/app/README.md", *(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    links = re.findall(r"\]\(([^)]+)\)", here.read_text(encoding="utf-8"))
    links = [link for link in links if not link.startswith("https:")]
    for link in links:
        path, _, anchor = link.partition("#")
        there = here.parent / path if path else here
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_files_of_the_map_exist() -> None:
    text = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    table = text.split("| paper |", 1)[1].split("\n\n", 1)[0]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(names) > 15
    for name in names:
        assert (ROOT / "herta_gpu" / name).exists() or (ROOT / name).exists(), name


def test_the_map_of_the_package_names_every_module_of_the_ground_floor() -> None:
    floor = {path.stem for path in (ROOT / "herta_gpu").glob("*.py")} - {"__init__", "__main__"}
    assert len(floor) > 15
    assert floor <= set(re.findall(r"\w+", herta_gpu.__doc__ or ""))


def test_help_lists_every_kind_of_certificate() -> None:
    text = (ROOT / "herta_gpu/certificate.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'"(residual|duality|nonnegative|none|spectral-\w+)"', text))
    assert len(kinds) >= 6
    assert all(f'"{kind}"' in (herta_gpu.Certificate.__doc__ or "") for kind in kinds)


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("certified relative gap <= ")
    assert "converged: 17 iterations" in printed
