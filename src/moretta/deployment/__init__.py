"""Runs over many machines: the jobs of server and sites, the commands that start them, and checks beforehand.

The modules:

    shared_settings.py  the part of a run file that sites receive, and each side's federation
    site.py             a site's place in a run: its role, its state on disk, and its share of the release
    controller.py       the server's job in FLARE; executor.py a site's
    job.py  serve.py  join.py  doctor.py   the commands of these names; checks.py the checks of doctor
    kits.py  provisioning.py  certificate_requests.py   startup kits: their content and pinned keys,
                        their creation and patches, and requests of sites with their own keys
    processes.py  server_connection.py  FLARE's processes, and the connection to its server, also by proxies
"""
