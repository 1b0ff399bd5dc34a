"""The project's documents as tests read them: code blocks, code in a line, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLACES = ("launcher", "trainer", "slurm", "docker", "tests", ".github")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the language it names and its text."""

    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that a block says it is, in a comment on its first line."""
        named = re.match(r"# ([\w-]+\.\w+)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones as one."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


@dataclass(frozen=True)
class Document:
    """A Markdown file of the project."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return [Block(*found.groups()) for found in _FENCE.finditer(self.text)]

    @property
    def prose(self) -> str:
        """All but the fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def code_spans(self) -> list[str]:
        """What stands between backticks, lines joined."""
        return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", self.prose)]

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures."""
        prose = re.sub(r"`[^`]*`", "", self.prose)
        return re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'src="([^"]+)"', prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name after #, as GitHub makes it of headings."""
        found: set[str] = set()
        for heading in re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE):
            base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            number = 0
            while (anchor := f"{base}-{number}" if number else base) in found:
                number += 1
            found.add(anchor)
        return found

    def section(self, title: str) -> list[Block]:
        """The blocks under a heading of the second level."""
        _, _, rest = self.text.partition(f"\n## {title}\n")
        assert rest, f"{self.name} has no section {title}"
        return [Block(*found.groups()) for found in _FENCE.finditer(rest.partition("\n## ")[0])]


def documents() -> list[Document]:
    """All of them, by name."""
    found = [*ROOT.glob("*.md"), *(path for p in _PLACES for path in (ROOT / p).rglob("*.md"))]
    return sorted(map(Document, found), key=lambda document: document.name)
