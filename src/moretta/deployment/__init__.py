"""Many machines: what server and sites each run, the commands that start it, and what looks whether it would work.

shared_settings.py  what sites are told of a run file, and the federation as the server has it
site.py             a site's place in a run: its role, its state on disk, what it is released
controller.py       the server's job in FLARE; executor.py a site's
job.py  serve.py  join.py  doctor.py   what the commands of these names do
check_result.py  machine_checks.py  kit_checks.py  site_checks.py  run_checks.py   what the doctor looks at
kits.py  provisioning.py  patching.py  certificates.py   startup kits: what is in one, made, changed, checked
processes.py  server_connection.py  administration.py    FLARE's processes, the way to its server, what it is asked
holding.py  server_key.py   who may use a folder; whom a site takes for the server
"""
