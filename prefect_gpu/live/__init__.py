"""The display of running flows, in a terminal and as words."""
