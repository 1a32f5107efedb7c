"""Page of a plan in HTML, and the figures that its pictures show.

In the process of ``banaserve plan``. Entry: ``html_page.write_page``.
"""
