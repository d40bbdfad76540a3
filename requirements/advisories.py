"""Look for known vulnerabilities of everything that is pinned: `python requirements/advisories.py`.

Exit codes: 0 nothing is known against it, or nobody could be asked (one line says so), 1 there is a vulnerability.
A machine that cannot reach the service that knows must be able to build; one that can must not ship what is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent
_TIMEOUT_S = 300


def ask(files: list[Path]) -> tuple[list[dict[str, Any]] | None, str]:
    """What pip-audit says of each package, or None and why it could say nothing."""
    named = [argument for path in files for argument in ("--requirement", str(path))]
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "10", *named], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S} s"
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        # The last line of a traceback names the address; which one it is, is the machine's business.
        return None, said[-1].partition(":")[0][:120]
    return found, ""


def judge(found: list[dict[str, Any]] | None, why: str) -> tuple[int, list[str]]:
    """The exit code, and the lines to print."""
    if found is None:
        return 0, [f"audit-deps: nothing was audited, the advisory service could not be asked ({why})"]
    bad = [
        f"audit-deps: {each['name']} {each['version']}: {flaw['id']}, mended in "
        f"{', '.join(flaw.get('fix_versions') or ()) or 'no version yet'}"
        for each in found
        for flaw in each.get("vulns", ())
    ]
    if bad:
        return 1, [*bad, f"audit-deps: FAILED, {len(bad)} known vulnerabilities; make requirements UPGRADE=1"]
    unknown = sorted(each["name"] for each in found if "skip_reason" in each)
    if len(unknown) == len(found):
        return 0, ["audit-deps: nothing was audited, the advisory service knows none of the packages from here"]
    more = f"; nothing is known of {', '.join(unknown)}" if unknown else ""
    return 0, [f"audit-deps: {len(found) - len(unknown)} packages, no known vulnerability{more}"]


def main() -> int:
    """Ask, judge and say so."""
    code, lines = judge(*ask(sorted(REQUIREMENTS.glob("*.txt"))))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
