"""Scripts that the theme of the site would fetch from elsewhere; each is under the MIT licence."""

from __future__ import annotations

from installer import npm, places

FOLDER = places.VENV / "docs" / "scripts"
SCRIPTS = {
    # Draws diagrams; the release that the theme asks for begins with 11.
    "mermaid.min.js": npm.PackedFile(
        "mermaid@11.17.2",
        "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
        "dist/mermaid.min.js",
    ),
    # Lets the search run where a page is opened as a file: browsers start no workers there.
    "iframe-worker.js": npm.PackedFile(
        "iframe-worker@1.0.4",
        "roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==",
        "shim/index.js",
    ),
}


def install() -> None:
    """Bring all of them into ``FOLDER``.

    Raises:
        Problem: One could not be had.
    """
    for name, packed in SCRIPTS.items():
        npm.bring(packed, FOLDER / name)
