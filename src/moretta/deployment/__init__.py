"""Many machines: what server and sites each run, the commands that start it, and checks of whether it would work.

shared_settings.py  what sites are sent of a run file, and each side's federation
site.py             a site's place in a run: what it plays, its state on disk, what it is released
controller.py       the server's job in FLARE; executor.py a site's
job.py  serve.py  join.py  doctor.py   what the commands of these names do; checks.py what doctor looks at
kits.py  provisioning.py  certificate_requests.py   startup kits: what is in one and which keys it pins,
                    made and patched, for a site's own key
processes.py  server_connection.py  FLARE's processes; its server reached, by proxies too, and asked
"""
