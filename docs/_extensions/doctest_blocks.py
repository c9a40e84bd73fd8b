"""Shows the `>>>` of docstrings as code: outside an Examples section they read as quotations."""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts every doctest of a docstring between fences, before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called with every module, class and function that was read."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
