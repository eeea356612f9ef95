"""mkdocs hooks: pages from the registry, and formulas as MathML, so that no browser has to fetch a script."""

from __future__ import annotations

import html
import pathlib
import re
import sys
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from foveal import registry

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import pages

FORMULA = re.compile(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.DOTALL)
UNKNOWN = re.compile(r"<m[ion]>\\")  # what the converter leaves of a command that it does not know


def on_config(config: Any) -> Any:
    """List the generated pages in the navigation, where mkdocs.yml names only their folder."""
    for entry in config.nav:
        for kind, folder in registry.FOLDERS.items():
            if entry.get(folder.title()) == f"{folder}/index.md":
                entry[folder.title()] = [f"{folder}/index.md", *(f"{folder}/{key}.md" for key in registry.names(kind))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add one page for each mechanism and policy, their indices and the reference."""
    made = {"reference.md": pages.reference()}
    for kind, folder in registry.FOLDERS.items():
        made[f"{folder}/index.md"] = pages.index(kind)
        made |= {f"{folder}/{cls.name}.md": pages.page(cls) for cls in registry.classes(kind)}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace every formula by MathML."""

    def rendered(match: re.Match[str]) -> str:
        source = html.unescape(match[3]).strip()
        display = "block" if match[2] == "[" else "inline"
        try:
            math = latex2mathml.converter.convert(source, display=display)
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: cannot render {source!r}: {error!r}") from error
        if UNKNOWN.search(math):
            raise PluginError(f"{page.file.src_uri}: unknown command in {source!r}")
        return f'<div class="formula">{math}</div>' if display == "block" else math

    return FORMULA.sub(rendered, content)
