"""The demo: a small real target, the chats that ship with the package, and the run over both.

Owns what is special about the demo. Nothing outside this room imports it but the command line.
"""
