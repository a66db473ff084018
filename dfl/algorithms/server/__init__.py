"""Methods in which clients send messages to a server, one file each."""
