"""Links of the built site and of Markdown files lead somewhere, and pages load nothing from elsewhere.

Links to other hosts are tried by ``nox -s docs -- --external``.
"""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "_build" / "html"


class _Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors = set(), set(), {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        if tag in {"img", "script", "source", "iframe"} and found.get("src"):
            self.loaded.add(found["src"])
        if tag == "link" and found.get("href"):
            self.loaded.add(found["href"])


@pytest.fixture(scope="module")
def pages():
    """Return the pages of the site that ``nox -s docs`` has built just before, by path."""
    found = {path: _Page(path.read_text()) for path in SITE.rglob("*.html")}
    assert found, f"no site in {SITE}"
    return found


def _missing(link, page, pages):
    """Return whether a link of ``page`` leads nowhere on the site or in the tree."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target not in pages:
        return not target.is_file() or bool(parts.fragment)
    return unquote(parts.fragment) not in pages[target].anchors


def _lacks(path, fragment):
    """Return whether a Markdown file has no such heading."""
    return bool(fragment) and path.suffix == ".md" and unquote(fragment) not in _headings(path)


def _headings(path):
    """Return the anchors that a code host gives to the headings of a Markdown file."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def test_links_of_the_site_lead_somewhere(pages):
    wrong = {
        f"{page.relative_to(SITE)}: {link}"
        for page, found in pages.items()
        for link in found.links
        if _missing(link, page, pages)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_pages_load_nothing_from_elsewhere(pages):
    wrong = {
        f"{page.relative_to(SITE)}: {source}"
        for page, found in pages.items()
        for source in found.loaded
        if urlsplit(source).netloc or _missing(source, page, pages)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_links_of_markdown_files_lead_somewhere():
    command = ["git", "ls-files", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone: there is no list of files")
    wrong = []
    for name in listed.stdout.split():
        path = ROOT / name
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or _lacks(target, parts.fragment):
                wrong.append(f"{name}: {link}")
    assert not wrong, "\n".join(wrong)


def test_readmes_are_short():
    readmes = [ROOT / "README.md", *ROOT.glob("packages/*/README.md")]
    lengths = {readme: len(readme.read_text().splitlines()) for readme in readmes}
    assert {readme: length for readme, length in lengths.items() if length > 160} == {}


def test_pages_have_no_directives_that_a_code_host_shows_as_they_are():
    directive = re.compile(r"(^```\{(?!eval-rst)|\{[\w:]+\}`)", re.MULTILINE)
    pages = [*ROOT.glob("README.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
    shown = {page: re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in pages}
    assert [page for page, text in shown.items() if directive.search(text)] == []
