"""Tables: what a column means (the schema), how files are read, and how columns become a model's inputs."""
