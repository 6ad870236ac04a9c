"""Changes made to a text before it is measured or tokenised: CoreNet's two, and Unicode's NFC."""

from __future__ import annotations

import re
import string
from functools import cache
from types import ModuleType

from openelm_jax.errors import UserError

# ftfy repairs line by line, and cuts longer lines into segments of so many characters.
SEGMENT_CHARS = 1_000_000
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What ftfy could change: all but tabs, line feeds and printable ASCII; and "&" while it still takes
# the text for one without markup, so that it turns "&amp;" into "&".
_REPAIRABLE = re.compile(r"[^\t\n -%'-~]")
_REPAIRABLE_IN_MARKUP = re.compile(r"[^\t\n -~]")


@cache
def import_ftfy() -> ModuleType:
    """Return ftfy; raises UserError when it is not installed."""
    try:
        import ftfy
    except ImportError as error:
        raise UserError(
            "data.normalize ftfy (what packing=corenet sets) needs the package ftfy; run "
            "pip install -e '.[corenet]'."
        ) from error
    return ftfy


def repair(text: str) -> str:
    """Return `ftfy.fix_text(text, normalization="NFC")`, without asking ftfy about plain lines.

    From the first "<" on ftfy leaves "&amp;" and the like alone, and so does this. Raises
    UserError when ftfy is not installed.
    """
    ftfy = import_ftfy()
    markup = text.find("<")
    markup = len(text) if markup < 0 else markup
    out, position = [], 0
    while True:
        found = _REPAIRABLE.search(text, position, markup)
        found = found or _REPAIRABLE_IN_MARKUP.search(text, position)
        if found is None:
            break
        start = text.rfind("\n", position, found.start()) + 1 or position
        end = text.find("\n", found.start()) + 1 or len(text)
        end = min(end, start + SEGMENT_CHARS)
        out.append(text[position:start])
        unescape = False if markup < end else "auto"
        out.append(ftfy.fix_text(text[start:end], normalization="NFC", unescape_html=unescape))
        position = end
    out.append(text[position:])
    return "".join(out)


def has_normalised_chars(text: str, least: int) -> bool:
    """Whether CoreNet's normalised copy of a text has at least `least` characters.

    The copy is lower case, without ASCII punctuation, and its whitespace is single spaces between
    words (`base_lm.py` of CoreNet, after SlimPajama). A beginning of the text can only have fewer.
    """
    return _normalised_chars(text[: 2 * least]) >= least or _normalised_chars(text) >= least


def _normalised_chars(text: str) -> int:
    return len(" ".join(text.lower().translate(_PUNCTUATION).split()))
