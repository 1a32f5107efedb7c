"""Policies of common balancers: by counts, load, hash, session or cached prefix (SGLang, AIBrix).

In a balancer's process. Begin at ``random_choice``, the shortest.
"""
