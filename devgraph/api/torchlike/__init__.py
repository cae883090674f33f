"""The shared base of backends whose device is a torch namespace."""
