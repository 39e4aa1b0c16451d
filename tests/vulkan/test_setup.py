"""`.ci/vulkan` finds the machine's own package source and names its backports, and no other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "vulkan"

MODERN = """\
# a comment
Types: deb
URIs: http://a.example/security
Suites: bookworm-security
Components: main
Signed-By: /k.gpg

Types: deb-src
URIs: http://b.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://c.example/debian
Suites: bookworm
Components: main

Types: deb deb-src
# mirror
URIs: http://d.example/debian
 http://e.example/debian
Suites: bookworm-updates
  bookworm
Components: main contrib
Architectures: amd64
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY
"""
MODERN_WANTED = """\
k3tvm-backports.sources
Types: deb
Suites: bookworm-backports
URIs: http://d.example/debian
 http://e.example/debian
Components: main contrib
Architectures: amd64
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY
"""
HOST = "http://a.example/debian"
OTHER = "http://z.example/other"
OPTIONS = "[arch=amd64 signed-by=/k.gpg]"


def run(folder: Path, command: str) -> str:
    """What a function of the script prints, with its sources below `folder`."""
    paths = {"K3TVM_APT": str(folder), "K3TVM_OS_RELEASE": str(folder / "os-release")}
    environment = os.environ | paths
    done = subprocess.run(
        ["bash", "-c", f". {SCRIPT}; {command}"], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_deb822_the_stanza_of_the_release_is_taken_with_its_key(apt: Path) -> None:
    (apt / "sources.list.d" / "x.sources").write_text(MODERN)
    assert run(apt, "backports_source bookworm") == MODERN_WANTED


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"deb {HOST} bookworm main x # why", f"deb {HOST} bookworm-backports main x"),
        (f"deb {OPTIONS} {HOST}  bookworm a", f"deb {OPTIONS} {HOST} bookworm-backports a"),
        (f"# deb {HOST} bookworm main", ""),
        (f"deb-src {HOST} bookworm main", ""),
        (f"deb {HOST} bookworm-updates main", ""),
        (f"deb {HOST} trixie main", ""),
    ],
)
def test_one_line_sources(apt: Path, text: str, wanted: str) -> None:
    (apt / "sources.list").write_text(f"deb {OTHER} stable main\n{text}\n")
    said = run(apt, "backports_source bookworm")
    assert said == (f"k3tvm-backports.list\n{wanted}\n" if wanted else "")


def test_without_sources_there_is_no_backports_source(apt: Path) -> None:
    assert run(apt, "backports_source bookworm") == ""
    assert run(apt, "knows_suite bookworm-backports || echo no") == "no\n"


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("x.sources", "Types: deb\nSuites: bookworm bookworm-backports\n", True),
        ("x.list", f"deb {HOST} bookworm-backports main", True),
        ("x.list", f"#deb {HOST} bookworm-backports main", False),
        ("x.list", f"deb {HOST} bookworm-backports-sloppy main", False),
        ("x.sources.off", "Suites: bookworm-backports\n", False),
    ],
)
def test_backports_that_are_there_already_are_not_added_again(
    apt: Path, name: str, text: str, known: bool
) -> None:
    (apt / "sources.list.d" / name).write_text(text)
    assert run(apt, "knows_suite bookworm-backports && echo yes || echo no").strip() == (
        "yes" if known else "no"
    )


def test_the_release_is_the_machines_own(apt: Path) -> None:
    (apt / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    assert run(apt, "codename") == "bookworm\n"


@pytest.mark.parametrize(
    ("version", "major"), [("25.0.7-2~bpo12+1", 25), ("1:24.2.8-1", 24), ("(none)", 0), ("", 0)]
)
def test_versions_are_compared_by_their_first_number(apt: Path, version: str, major: int) -> None:
    assert run(apt, f"major '{version}'") == f"{major}\n"
