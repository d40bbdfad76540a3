"""Hooks of mkdocs: the navigation, which follows from the folders, and pages and files outside docs/.

The pages are written to be read in the repository too, so they link to files beside docs/: the README, examples,
manifests. Those that are linked to become part of the site, under `project/`, and the links are turned to them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLAIN_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
PROJECT = "project"

# Where a page belongs; the order is that of the navigation. A page that is not named here is a guide.
SECTIONS: dict[str, list[str]] = {
    "Start": ["getting-started.md", "demo.md", "walkthrough.md"],
    "Concepts": ["concepts.md", "fleet.md", "states.md", "glossary.md", "comparison.md"],
    "Writing an app": ["handlers.md", "state.md", "jobs.md", "transcode.md", "priority.md", "testing.md"],
    "Operating": [
        "operating.md",
        "deployment.md",
        "moving.md",
        "throughput.md",
        "sizing.md",
        "observability.md",
        "console.md",
        "security.md",
        "migration.md",
    ],
    "Data pipeline": [
        "spark.md",
        "spark-sink.md",
        "pipelines.md",
        "analytics.md",
        "ledger.md",
        "audit.md",
        "replay.md",
    ],
    "How it is tested": ["simulation.md", "chaos.md"],
}
FOLDERS = {"runbooks": "Runbooks", "benchmarks": "Benchmark results", "reference": "Reference", "adr": "Decisions"}
MORE = "Further guides"
ABOUT = ("README.md", "examples/README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation, and anchors as GitHub makes them."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slugify, "permalink": "#"}
    pages = sorted(path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md"))
    config.nav = navigation(pages)
    return config


def slugify(heading: str, separator: str) -> str:
    """The anchor of a heading, as it is in the repository."""
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", separator)


def navigation(pages: Iterable[str]) -> list[Any]:
    """Sort all pages into sections: those that are named, then folders, then the rest."""
    left = [page for page in pages if page != "index.md"]
    nav: list[Any] = ["index.md"]

    def section(title: str, wanted: Iterable[str]) -> None:
        found = [page for page in wanted if page in left]
        left[:] = [page for page in left if page not in found]
        if found:
            nav.append({title: found})

    for title, names in SECTIONS.items():
        section(title, names)
    section(MORE, [page for page in left if page.partition("/")[0] not in FOLDERS])
    for folder, title in FOLDERS.items():
        section(title, [page for page in left if page.startswith(f"{folder}/")])
    nav.append({"Project": [_site_path(path) for path in ABOUT]})
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to and docs/ does not hold; pages that come in that way may link to more."""
    waiting = [ROOT / path for path in ABOUT]
    waiting += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen: set[Path] = set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        inside = _inside(source)
        if inside.parts[0] != "docs":
            files.append(File.generated(config, _site_path(inside.as_posix()), abs_src_path=str(source)))
        if source.suffix == ".md":
            waiting += [target for target in _targets(source) if _inside(target).parts[0] != "docs"]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to where they are on the site."""
    if page.file.abs_src_path is None:
        return markdown
    return relink(markdown, Path(page.file.abs_src_path))


def relink(text: str, source: Path) -> str:
    """The page with its links as they are on the site; a link to a folder loses its target, a site has no folders."""
    here = posixpath.dirname(_site_path(_inside(source).as_posix()))

    def found(target: str) -> Path | None:
        path = target.partition("#")[0]
        return None if "://" in target or not path or path.startswith("mailto:") else (source.parent / path).resolve()

    def flatten(match: re.Match[str]) -> str:
        file = found(match[2])
        return match[1] if file and file.is_dir() else match[0]

    def turn(match: re.Match[str]) -> str:
        file = found(match[1])
        if file is None:
            return match[0]
        _, mark, anchor = match[1].partition("#")
        where = posixpath.relpath(_site_path(_inside(file).as_posix()), here or ".")
        return f"]({where}{mark}{anchor})"

    parts = FENCE.split(text)
    return "".join(
        part if part.startswith("```") else LINK.sub(turn, PLAIN_LINK.sub(flatten, part)) for part in parts
    )


def _targets(source: Path) -> list[Path]:
    """The files that a page links to."""
    links = LINK.findall(FENCE.sub("", source.read_text(encoding="utf-8")))
    paths = [target.partition("#")[0] for target in links if "://" not in target]
    files = [(source.parent / path).resolve() for path in paths if path]
    return [file for file in files if file.is_file()]


def _inside(path: Path) -> Path:
    return path.relative_to(ROOT)


def _site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PROJECT}/{path}"
