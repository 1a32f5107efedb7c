"""Terminal of a command: errors and tables, output of libraries kept out, completion of words.

In a process of each command. Entry: ``console.print_error``.
"""
