"""A hook of `make docs`: links that leave docs/, such as to a script, lead to a copy of the file within the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page, with such links bent."""
    docs = Path(config.docs_dir)
    here = Path(page.file.src_uri).parent

    def bent(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(docs / here / link[1]))
        if target.is_relative_to(docs) or target.suffix == ".md" or not target.is_file():
            return link[0]
        inside = Path("source") / target.relative_to(docs.parent)
        if inside.as_posix() not in files.src_uris:
            files.append(File.generated(config, inside.as_posix(), abs_src_path=str(target)))
        return f"]({Path(os.path.relpath(inside, here)).as_posix()})"

    return _LINK.sub(bent, markdown)
