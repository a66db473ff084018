"""Methods in which peers send messages to their neighbours, one file each."""
