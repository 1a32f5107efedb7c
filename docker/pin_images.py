#!/usr/bin/env python3
"""Pins the images of Dockerfiles and compose files by digest.

    docker/pin_images.py          # ask the registries; NAME:TAG becomes NAME:TAG@sha256:...
    docker/pin_images.py --check  # refuse images without a digest, as a release build does

A tag may name another image tomorrow, a digest may not. Pin again to take a tag's newer image.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

FOLDER = Path(__file__).parent
NAMES = ("Dockerfile.cpu", "Dockerfile.cuda", "compose.yml")
_OURS = "banaserve:"
_LINE = re.compile(
    r"^(?P<before>[ ]*(?:FROM|image:)[ ]+)(?P<image>[^\s@$]+)(?P<digest>@\S+)?(?=\s|$)", re.M
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_STAGE = re.compile(r"^FROM .* AS (\S+)", re.M)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 30.0
_KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


class Place(NamedTuple):
    """Where a registry has an image."""

    registry: str
    repository: str
    tag: str


class NoDigestError(Exception):
    """An image's digest cannot be had; the message is one line."""


def place_of(image: str) -> Place:
    """Where ``image`` is, by Docker's rules for short names."""
    name, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return Place(f"https://{first}", rest, tag or "latest")
    repository = name if slash else f"library/{name}"
    return Place("https://registry-1.docker.io", repository, tag or "latest")


def digest_of(image: str, at: Callable[[str], Place] = place_of) -> str:
    """The digest that a registry has for an image, for all of its platforms.

    Raises:
        NoDigestError: It does not answer, or knows no such image.
    """
    place = at(image)
    url = f"{place.registry}/v2/{place.repository}/manifests/{place.tag}"
    asked = Request(url, method="HEAD", headers={"Accept": ", ".join(_KINDS)})
    try:
        try:
            answer = urlopen(asked, timeout=_TIMEOUT_S)
        except HTTPError as refused:
            if refused.code != 401:
                raise
            token = _token(refused.headers.get("WWW-Authenticate", ""))
            asked.add_header("Authorization", f"Bearer {token}")
            answer = urlopen(asked, timeout=_TIMEOUT_S)
        with answer:
            found = str(answer.headers.get("Docker-Content-Digest", ""))
    except (URLError, OSError, ValueError, KeyError) as error:
        raise NoDigestError(
            f"{image}: {place.registry} does not tell its digest: {error}"
        ) from error
    if not _DIGEST.fullmatch(found):
        raise NoDigestError(f"{image}: {place.registry} tells no digest: {found!r}")
    return found


def _token(challenge: str) -> str:
    """What a registry's own server gives to whoever asks, for reading."""
    terms = dict(_CHALLENGE.findall(challenge))
    query = urlencode({name: terms[name] for name in ("service", "scope") if name in terms})
    with urlopen(f"{terms['realm']}?{query}", timeout=_TIMEOUT_S) as answer:
        said = json.load(answer)
    return str(said.get("token") or said["access_token"])


def unpinned(text: str) -> list[str]:
    """Images of other people that a file names without a digest."""
    stages = set(_STAGE.findall(text))
    found = []
    for one in _LINE.finditer(text):
        image, digest = one["image"], (one["digest"] or "").removeprefix("@")
        if not image.startswith(_OURS) and image not in stages and not _DIGEST.fullmatch(digest):
            found.append(image)
    return found


def pinned(text: str, digest: Callable[[str], str]) -> str:
    """A file with the digest of each image of other people, asked for anew."""
    stages = set(_STAGE.findall(text))

    def pin(one: re.Match[str]) -> str:
        image = one["image"]
        if image.startswith(_OURS) or image in stages:
            return one[0]
        return f"{one['before']}{image}@{digest(image)}"

    return _LINE.sub(pin, text)


def main(argv: list[str]) -> int:
    if argv not in ([], ["--check"]):
        print("usage: pin_images.py [--check]", file=sys.stderr)
        return 2
    paths = [FOLDER / name for name in NAMES]
    if argv:
        bad = [f"{path.name}: {image}" for path in paths for image in unpinned(path.read_text())]
        for line in bad:
            print(f"{line} has no digest: `make pin-images` looks it up", file=sys.stderr)
        return bool(bad)
    known: dict[str, str] = {}

    def digest(image: str) -> str:
        if image not in known:
            known[image] = digest_of(image)
        return known[image]

    try:
        texts = [pinned(path.read_text(), digest) for path in paths]
    except NoDigestError as error:
        print(f"nothing is changed: {error}", file=sys.stderr)
        return 1
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    for image, found in known.items():
        print(f"{image}@{found}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
