"""From a file to settings: the run file, its sections, a site's silo.toml, and the sentences for mistakes."""
