"""What the site holds beside the files of docs/: pages made from the code, and links that leave docs/.

- `index.md` is the repository's README.
- `reference/configuration.md` is made from the attrs classes that check a configuration.
- A link to a file outside docs/ becomes its text: the site does not hold that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

from omni_trainer import config_reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=LINK.sub(_of_readme, readme)))
    said = "\n".join(configuration_page())
    files.append(File.generated(config, "reference/configuration.md", content=said))
    return files


def _of_readme(link: re.Match[str]) -> str:
    """Turn a link from the root of the repository into one from docs/, or into its text."""
    inside = link[2].startswith("docs/")
    return f"[{link[1]}]({link[2].removeprefix('docs/')})" if inside else _plain(link)


def _plain(link: re.Match[str]) -> str:
    return f"`{link[1].strip('`')}`"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the text of links that leave docs/."""
    folder = PurePosixPath(page.file.src_uri).parent
    pieces, end = [], 0
    for block in FENCE.finditer(markdown):
        pieces += [_without_leaving(markdown[end : block.start()], folder), block.group()]
        end = block.end()
    return "".join([*pieces, _without_leaving(markdown[end:], folder)])


def _without_leaving(text: str, folder: PurePosixPath) -> str:
    def kept(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        found = (DOCS / folder / target).resolve()
        inside = found.is_relative_to(DOCS) or not found.exists()
        return link.group() if inside else _plain(link)

    return LINK.sub(kept, text)


def configuration_page() -> Iterator[str]:
    """Lines of the reference of the configuration."""
    yield "# Configuration reference\n"
    yield (
        "Every key, from the classes that check it; `omni config describe KEY` prints the same. "
        "[Configuration](../configuration.md) says how layers and plugins work.\n"
    )
    for section in config_reference.sections():
        yield f"## {section.title}\n"
        yield f"{section.summary}\n"
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for key in section.keys:
            cells = [f"`{key.path}`", key.type, f"`{key.default}`", key.meaning]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
