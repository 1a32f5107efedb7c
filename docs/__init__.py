"""Commands that check the documents and build their site, for ``make lint`` and ``make docs``."""
