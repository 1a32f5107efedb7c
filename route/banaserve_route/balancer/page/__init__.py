"""Page of a balancer under ``/ui``: its files, and the status that it shows.

In the balancer's process. Entry: ``status.status_of``. Most files are those of a server's page.
"""
