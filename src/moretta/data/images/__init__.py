"""Images, from publishers' files and from a user's own folders, as pixels and labels."""
