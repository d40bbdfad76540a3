"""The bill of materials names all that is pinned, and a known vulnerability fails the build, an outage does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from requirements.advisories import judge
from requirements.materials import read_pins, write_bom

ROOT = Path(__file__).parents[2]


def test_every_pinned_requirement_is_in_the_bill_of_materials() -> None:
    bom = json.loads(write_bom(read_pins(), "1.0"))
    assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", "parti")
    there = {(each["name"], each["version"]) for each in bom["components"]}
    pinned = set()
    for path in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([^\s#=]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE):
            pinned.add((re.sub(r"[-_.]+", "-", name).lower(), version))
    assert len(pinned) > 80
    assert there == pinned


def test_a_package_is_there_once_with_its_hashes_and_where_it_is_needed() -> None:
    bom = json.loads(write_bom(read_pins(), "1.0"))
    (client,) = [each for each in bom["components"] if each["name"] == "nats-py"]
    said = [each["value"] for each in client["properties"] if each["name"] == "parti:requirements"]
    hashes = [each["value"] for each in client["properties"] if each["name"] == "parti:sha256"]
    assert "core" in said[0].split(",")
    assert hashes
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
    assert client["scope"] == "required"
    assert client["purl"] == f"pkg:pypi/nats-py@{client['version']}"


def test_the_same_pins_give_the_same_serial_number() -> None:
    pins = read_pins()
    numbers = {json.loads(write_bom(pins, version))["serialNumber"] for version in ("1.0", "1.0", "1.1")}
    assert len(numbers) == 2


FINE = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "odd", "version": "4", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        ([FINE], 0, "1 packages, no known vulnerability"),
        ([FINE, BAD, UNKNOWN], 1, "bad 2: CVE-1, mended in 3"),
        ([FINE, UNKNOWN], 0, "nothing is known of odd"),
        ([UNKNOWN], 0, "nothing was audited"),
        (None, 0, "nothing was audited, the advisory service could not be asked (ConnectionError)"),
    ],
)
def test_what_is_known_fails_and_what_cannot_be_asked_is_said(
    found: list[dict[str, Any]] | None, code: int, text: str
) -> None:
    given, lines = judge(found, "ConnectionError")
    assert given == code
    assert text in lines[0]
    assert len(lines) == (2 if code else 1)
