"""Headers of the SSD tier's files: the one that was written, or a record error."""

from __future__ import annotations

from hypothesis import given

from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES, RecordError, checksum, decode, encode
from corpus import attempt, fuzzed, kept, spoiled


def _page(data: bytes, is_sealed: bool) -> bytes:
    """``data`` as a page; sealed, its checksum is right, as a hostile writer's would be."""
    body = data[: PAGE_BYTES - 8].ljust(PAGE_BYTES - 8, b"\0")
    stored = data[PAGE_BYTES - 8 : PAGE_BYTES].ljust(8, b"\0")
    return body + (checksum(body).to_bytes(8, "little") if is_sealed else stored)


@fuzzed
@given(spoiled("records"))
def test_a_page_is_a_header_or_a_record_error(data: bytes) -> None:
    for page in (data, _page(data, False), _page(data, True)):
        header, error = attempt(lambda: decode(page), RecordError)  # noqa: B023
        assert str(error).isprintable()
        if header is None:
            continue
        assert encode(header) == page


def test_what_is_kept_is_decoded() -> None:
    assert any(encode(decode(page)) == page for page in kept("records"))
