"""Messages between the ranks of a run: groups and threads of their own, versioned, with an end."""
