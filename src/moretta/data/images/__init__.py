"""Images, from publishers' files and from folders of one's own, as pixels and labels."""
