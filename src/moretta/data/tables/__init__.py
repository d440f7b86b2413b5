"""Tables: schemas of their columns, readers of their files, and their form as a model's inputs."""
