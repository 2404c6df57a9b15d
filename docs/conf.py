"""How Sphinx builds the site from these pages; see `site` in tox.ini."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent

project = "kinetic"
author = "The Kinetic authors"
project_copyright = author
release = importlib.metadata.version("kinetic-aio")

extensions = [
    "myst_parser",
    "notfound.extension",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
    "sphinxext.opengraph",
]

# Relative, because the site has no fixed address, and may lie in a folder of it.
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"

html_theme = "furo"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0f766e", "color-brand-content": "#0f766e"},
    "dark_css_variables": {"color-brand-primary": "#2dd4bf", "color-brand-content": "#2dd4bf"},
}
html_title = "kinetic"
html_show_sphinx = False
html_search_scorer = str(HERE / "search_scorer.js")

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "autolink"  # `JobHandle` in a docstring links to its entry
autosummary_generate = False
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Cancelled"]
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # `JobHandle` is a name of two modules, with the same methods

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
notfound_urls_prefix = "/"
ogp_site_url = ""  # services that show a link's card need `sphinx-build -D ogp_site_url=https://…/`
ogp_image = "_static/card.png"
ogp_image_alt = "kinetic: run any Python function on cloud TPUs and GPUs"
ogp_custom_meta_tags = ['<meta name="twitter:card" content="summary_large_image" />']
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}

# The site builds offline, so nothing resolves names of the standard library.
nitpicky = True
_ELSEWHERE = r"(asyncio|builtins|collections|logging|os|pathlib|subprocess|types|typing)\..*"
_TYPE_VARIABLES = r"(kinetic\.(\w+\.)*)?(P|R|R_co|S|T|T_co|X)(\.args|\.kwargs)?|typing\.~P"
_INTERNAL = (
    r"kinetic\.(\w+\.)*_.*|kinetic\.aio\.(infra\.\w+|kubernetes\.access)\.\w+"
    r"|Archive|ByteStream|Crew|DebuggerAddress|Follow|Forwarder|Goal|Iteration|JobRef|MapSettings"
    r"|OnFailure|Snapshots|Space|Study|wire\.Order"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({_ELSEWHERE}|{_TYPE_VARIABLES}|{_INTERNAL})"),
    ("py:obj", r".*"),  # `name` in a docstring: without an entry it stays text
]

# Files of the repository that are pages of the site. A link to one leads to its page.
PAGES = {
    ROOT / "README.md": HERE / "index.md",
    ROOT / "CHANGELOG.md": HERE / "changelog.md",
    ROOT / "CODE_OF_CONDUCT.md": HERE / "code-of-conduct.md",
    ROOT / "CONTRIBUTING.md": HERE / "contributing.md",
    ROOT / "SECURITY.md": HERE / "reporting_vulnerabilities.md",
    ROOT / "benchmarks" / "README.md": HERE / "benchmarks.md",
}
_INCLUDE = re.compile(
    r"^```\{include\} (\S+)\n(?::start-after: (.+)\n:end-before: (.+)\n)?```$", re.MULTILINE
)
_CODE = re.compile(r"^```\{literalinclude\} (\S+)\n:language: (\w+)\n```$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def _with_links_of_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Include files of the repository, and lead links between them to pages of the site."""
    folder = (HERE / page).parent

    def linked(text: str, base: Path) -> str:
        def link(match: re.Match[str]) -> str:
            target = Path(os.path.normpath(base / match[1]))
            return "](" + os.path.relpath(PAGES.get(target, target), folder).replace(os.sep, "/")

        return _LINK.sub(link, text)

    def included(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / match[1]))
        text = file.read_text(encoding="utf-8")
        if match[2] is not None:
            text = text.partition(match[2])[2].partition(match[3])[0]
        return linked(text, file.parent)

    def quoted(match: re.Match[str]) -> str:
        return f"```{match[2]}\n{(folder / match[1]).read_text(encoding='utf-8')}```"

    # A page with an include links to no file outside docs: only included links get a new base.
    whole, count = _INCLUDE.subn(included, source[0])
    # After the links: code may have text that looks like one.
    source[0] = _CODE.sub(quoted, whole if count else linked(whole, folder))


def _with_included_text(app: Sphinx, error: Exception | None) -> None:
    """Show the text of included files in llms-full.txt, which is made from `_sources`."""
    for page in sorted(app.env.found_docs):
        text = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
        copy = Path(app.outdir, "_sources", f"{page}.md.txt")
        if (_INCLUDE.search(text) or _CODE.search(text)) and copy.exists():
            source = [text]
            _with_links_of_the_site(app, page, source)
            copy.write_text(source[0], encoding="utf-8")


def _without_a_type(
    app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Undo what napoleon does to "Return what is left: ..." of a property: a type and its text."""
    for line in [line for line in lines if line.startswith(":type: ")]:
        lines.remove(line)
        lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _without_a_type, priority=600)
    app.connect("source-read", _with_links_of_the_site)
    app.connect("build-finished", _with_included_text, priority=400)  # before sphinx_llms_txt
