"""Text of the page around its tables; figures in it are those of the tables."""

OPENING = """# x"""
ROOM = """## y"""
SIMULATED = """## z"""
CONCLUSION = """
"""
