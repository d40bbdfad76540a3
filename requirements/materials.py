"""Write the bill of materials: every pinned package, as CycloneDX JSON: `python requirements/materials.py FILE`.

It says what the requirements files say, with their hashes: nothing is looked up, so it is the same on every machine.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

REQUIREMENTS = Path(__file__).parent
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(slots=True)
class Pin:
    """One package at one version."""

    name: str
    version: str
    files: set[str] = field(default_factory=set)
    """Requirements files that name it, without their ending."""
    hashes: set[str] = field(default_factory=set)
    """Of its distributions."""


def read_pins(directory: Path = REQUIREMENTS) -> list[Pin]:
    """Every pin of the requirements files, by name."""
    pins: dict[tuple[str, str], Pin] = {}
    for path in sorted(directory.glob("*.txt")):
        pin: Pin | None = None
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := _PIN.match(line):
                name = re.sub(r"[-_.]+", "-", found[1]).lower()
                pin = pins.setdefault((name, found[2]), Pin(name, found[2]))
                pin.files.add(path.stem)
            if pin:
                pin.hashes.update(_HASH.findall(line))
    return [pins[key] for key in sorted(pins)]


def write_bom(pins: list[Pin], version: str) -> str:
    """The bill of materials as JSON; its serial number follows from what is in it."""
    bom = Bom()
    root = bom.metadata.component = Component(name="parti", version=version, type=ComponentType.APPLICATION)
    for pin in pins:
        purl = PackageURL("pypi", None, pin.name, pin.version)
        properties = [Property(name="parti:requirements", value=",".join(sorted(pin.files)))]
        properties += [Property(name="parti:sha256", value=each) for each in sorted(pin.hashes)]
        bom.components.add(
            Component(
                name=pin.name,
                version=pin.version,
                type=ComponentType.LIBRARY,
                purl=purl,
                bom_ref=str(purl),
                scope=ComponentScope.REQUIRED if "core" in pin.files else ComponentScope.OPTIONAL,
                properties=properties,
            )
        )
    bom.register_dependency(root, bom.components)
    content = ",".join(f"{pin.name}=={pin.version}" for pin in pins)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"parti:{version}:{content}")
    return JsonV1Dot6(bom).output_as_string(indent=2)


def main() -> int:
    """Write the file that is named, and say what is in it."""
    target = Path(sys.argv[1])
    pins = read_pins()
    source = (REQUIREMENTS.parent / "src" / "parti" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(write_bom(pins, found[1] if found else "0") + "\n", encoding="utf-8")
    counts: defaultdict[str, int] = defaultdict(int)
    for pin in pins:
        counts["core" if "core" in pin.files else "other"] += 1
    print(f"{target}: {len(pins)} packages, {counts['core']} of them needed by every worker")
    return 0


if __name__ == "__main__":
    sys.exit(main())
