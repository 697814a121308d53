"""What a run leaves behind: client state, history, results."""
