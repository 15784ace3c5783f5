"""What is shown of flows while they run, in a terminal and as words."""
