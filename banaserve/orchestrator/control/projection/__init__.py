"""State of instances once the steps that are under way or planned are done. Pure.

In the server's process, and in the simulator. Entry: ``projection.project``.
"""
