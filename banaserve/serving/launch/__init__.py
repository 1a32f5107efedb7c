"""Launch of engines and guests from the server's process.

Entry: ``launcher``; the main functions of what is launched are in ``mains``.
"""
