"""The page as one answer: styles, scripts and the picture of this moment are in it. Pure.

A new browser then waits for one request instead of a dozen, of which it makes six at a time. Nothing else may run on
the page: `policy` names what is in it by hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping

_STYLES = '<link rel="stylesheet" href="static/console.css">'
_THEME = '<script src="static/theme.js"></script>'
_MAIN = '<script type="module" src="static/main.js"></script>'
_PICTURE = "<!-- picture -->"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


class Document:
    """`index.html` with its files inside; `fill` puts a picture into it."""

    def __init__(self, files: Mapping[str, str]) -> None:
        styles, theme, main = files["console.css"], files["theme.js"], bundle("main.js", files)
        page = files["index.html"]
        for place, inside in (
            (_STYLES, f"<style>{styles}</style>"),
            (_THEME, f"<script>{theme}</script>"),
            (_MAIN, f'<script type="module">{main}</script>'),
        ):
            page = _put(page, place, inside)
        self._before, self._after = (part.encode() for part in _put(page, _PICTURE, "\0").split("\0"))
        self.policy = (
            f"default-src 'none'; script-src 'self' {_hash(theme)} {_hash(main)}; style-src 'self' {_hash(styles)}; "
            "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )

    def fill(self, picture: bytes) -> bytes:
        """The page with a picture, given as JSON."""
        # In JSON `<` stands in strings only; written like this, nothing in one of them can end the element.
        inside = picture.replace(b"<", b"\\u003c")
        return b'%b<script type="application/json" id="picture">%b</script>%b' % (self._before, inside, self._after)


def bundle(name: str, files: Mapping[str, str]) -> str:
    """A module and all that it imports as one text, each once and before who needs it.

    Modules import by name, in one line each, and no two have the same name at their top: a browser refuses the text
    otherwise, and every test that opens one fails.
    """
    done: dict[str, str] = {}

    def take(each: str) -> None:
        if each not in done:
            for needed in _IMPORT.findall(files[each]):
                take(needed)
            done[each] = _EXPORT.sub("", _IMPORT.sub("", files[each]))

    take(name)
    return "\n".join(done.values())


def _put(page: str, place: str, inside: str) -> str:
    if page.count(place) != 1:
        raise ValueError(f"index.html has {page.count(place)} times {place!r}; expected it once")
    return page.replace(place, inside)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
