"""Many machines: what server and sites each run, the commands that start it, and what looks whether it would work.

told.py        what sites are told of a run file, and the federation as the server has it
silo_file.py   silo.toml: what a site says of itself, its rows and its limits
site.py        a site's place in a run: its role, its state on disk, what it is released
controller.py  the server's job in FLARE; executor.py a site's
job.py  serve.py  join.py  doctor.py   what the commands of these names do
"""
