"""Commands that check the documents and build their site; ``make docs`` and ``make lint`` run them."""
