"""What of this folder pytest must not import, as it would to look for doctests."""

collect_ignore = ["light_server.py", "light_engine.py"]  # of a program that sets up vLLM for its own process
