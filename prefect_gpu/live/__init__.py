"""The display of running flows: the live view in a terminal, and the text of progress artifacts."""
