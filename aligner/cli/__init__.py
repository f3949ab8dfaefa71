"""The command line: ``aligner <command>``. One thin module a command; see ``main.py``."""
